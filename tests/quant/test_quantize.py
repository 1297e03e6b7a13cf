"""Quantizing Params: which leaves, on arrays and on shapes, in how much memory, and what cannot be quantized."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.errors import ConfigError, QuantizationError
from jllm.files.hf_config import load_config
from jllm.files.save import save
from jllm.model.model import Model
from jllm.model.param_specs import abstract_params
from jllm.model.params import EMBED, HEAD, linears, matrix_modules, with_matrices
from jllm.quant import quantize as module
from jllm.quant.quantize import quantize, weight_formats
from jllm.quant.schemes import PRESETS, Scheme
from pallas_kernels.formats import quantized_weights
from pallas_kernels.formats.quantized_weights import QuantizedWeight, encode
from pallas_kernels.formats.weight_formats import parse_weight_format
from tests.checkpoint_cases import assert_same_bits
from tests.load_memory import measured
from tests.tiny import tiny_model

CONFIGS = Path(__file__).parent.parent.parent / "configs"
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
decode = jax.jit(quantized_weights.decode)


@pytest.fixture(scope="module")
def model():
    return tiny_model(**WIDE)


@pytest.mark.parametrize("name", ["bf16", "w8a8", "w4a16-g128"])
def test_named_weights_are_encoded_and_others_are_the_same_arrays(model, name):
    params = quantize(model.params, name)
    formats = PRESETS[name].formats(matrix_modules(model.params))
    before, after = ({EMBED: p.embed, HEAD: p.head} | linears(p) for p in (model.params, params))
    for weight, leaf in after.items():
        if wanted := formats.get(weight):
            fmt = next(f for f in wanted if f.group is None or before[weight].shape[1] % f.group == 0)
            assert leaf.format == fmt
            assert_same_bits(leaf, jax.jit(encode, static_argnums=1)(before[weight], fmt))
        else:
            assert leaf is before[weight]
    assert params.layers[1].mlp.norm is model.params.layers[1].mlp.norm


@pytest.mark.parametrize("name", ["w8a8", "w4a16-g64-zp", "nf4-dq", "fp8"])
def test_shapes_alone(model, name):
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.params)
    real = quantize(model.params, name)
    got = quantize(shapes, name)
    assert jax.tree.structure(got) == jax.tree.structure(real)
    assert [(s.shape, s.dtype) for s in jax.tree.leaves(got)] == [(a.shape, a.dtype) for a in jax.tree.leaves(real)]


BITS = {"bf16": 16, "w8a16": 8, "w8a8-all": 8, "fp8": 8, "fp8-b128": 8 + 32 / 128, "uint8-zp": 8}
BITS |= {"w4a16-g128": 4 + 16 / 128, "w4a16-g32": 4.5, "w4a16-g64-zp": 4 + 24 / 64}
BITS |= {"nf4": 4.25, "nf4-dq": 4 + 8 / 64 + 32 / 256 / 64}


@pytest.mark.parametrize("name", BITS)
def test_bytes_of_a_7b_model(name):
    """6.48 billion weights in linear layers, by the formula; row scales are a thousandth and less."""
    config = load_config(CONFIGS / "llama-2-7b.json")
    found = Model(config, quantize(abstract_params(config, jnp.bfloat16), name)).memory_footprint()
    E, F = config.hidden_size, config.intermediate_size
    linears = config.num_layers * (4 * E * E + 3 * E * F)
    stored = sum(found.get(kind, 0) for kind in ("linears", "codes", "scales"))
    assert stored == pytest.approx(linears * BITS[name] / 8, rel=2e-3)
    assert found["embedding"] == found["head"] == config.vocab_size * E * 2
    assert found["total"] == stored + 2 * found["embedding"] + found["norms"]


def test_footprint_tells_kinds_apart():
    model = tiny_model(**WIDE)
    params = quantize(model.params, Scheme("x", (("embed_tokens", "w8a16"), ("o_proj", "w4a16-g32-zp"))))
    found = replace(model, params=params).memory_footprint()
    assert params.dtype == model.params.dtype == jnp.float32  # the embedding's codes are int8
    V, E = 97, 128
    assert found["codes"] == 128 * E + 2 * E * E // 2  # the vocabulary is padded to 128
    assert found["scales"] == 128 * 4 + 2 * (E // 32) * E * (2 + 1)
    assert found["head"] == V * E * 4
    assert found["norms"] == (2 * 2 + 1) * E * 4
    assert found["total"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.fixture
def live(monkeypatch):
    """Bytes of arrays that are alive each time a weight has just been quantized, its source included."""
    seen: list[int] = []
    original = module._encode

    def spy(w, fmt):
        out = jax.block_until_ready(original(w, fmt))
        seen.append(sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted()))
        return out

    monkeypatch.setattr(module, "_encode", spy)
    return seen


def weights_bytes(params) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("donate", [True, False])
def test_a_donated_model_takes_its_own_size_and_a_weight(live, donate):
    model = tiny_model(num_layers=6, **WIDE)
    size, largest = weights_bytes(model.params), model.params.layers[0].mlp.gate_up.nbytes
    others = sum(x.nbytes for x in jax.live_arrays()) - size
    params = quantize(model.params, "w8a16", donate=donate)
    most = max(live) - others
    assert (most <= size + largest) == donate, (most, size, largest)  # without, the bound must be seen to break
    assert model.params.layers[5].mlp.down.is_deleted() == donate
    assert not model.params.norm.is_deleted()
    assert not params.embed.is_deleted()


def test_the_wide_model_never_exists_whole_while_loading(live, tmp_path):
    model = tiny_model(num_layers=6, **WIDE)
    save(tmp_path, model.params, model.config)
    size, largest = weights_bytes(model.params), model.params.layers[0].mlp.gate_up.nbytes
    want = quantize(model.params, "w4a16-g64")
    live.clear()
    others = sum(x.nbytes for x in jax.live_arrays())
    loaded = jllm.load(tmp_path, quantize="w4a16-g64")
    assert_same_bits(loaded.params, want)
    assert max(live) - others < weights_bytes(loaded.params) + 2 * largest < size / 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_loading_takes_less_memory_than_the_wide_model_and_a_weight():
    """By the resident set of a process; loading it whole and then quantizing would take 296 MiB and more."""
    figures = measured("bfloat16", "w8a8-all")
    assert figures["params_mib"] < 110
    assert figures["peak_mib"] - figures["baseline_mib"] < 192 + figures["largest_leaf_mib"] + 64, figures


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bar_shows_on_a_terminal_alone(model, monkeypatch, terminal):
    screen = io.StringIO()
    screen.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(module, "DELAY", 0)
    quantize(model.params, "w8a16")
    assert ("quantizing: " in screen.getvalue()) == terminal


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["w8a8-all", "nf4", "fp8", "w4a16-g32-zp"])
def test_what_is_no_number_is_named(model, value, name):
    layer = model.params.layers[1]
    broken = with_matrices(layer, {"down": layer.mlp.down.at[3, 5].set(value)})
    params = replace(model.params, layers=(model.params.layers[0], broken))
    with pytest.raises(QuantizationError, match=r"^model\.layers\.1\.mlp\.down_proj holds NaN or infinity"):
        quantize(params, name)


@pytest.mark.parametrize("name", ["w8a8", "fp8", "uint8-zp", "w4a16-g32-zp", "nf4", "nf4-dq"])
def test_channels_of_zeros_give_zeros(model, name):
    one, other = model.params.layers
    zeroed = (one.attention.o.at[3].set(0), jnp.zeros_like(other.attention.o))
    layers = tuple(with_matrices(layer, {"o": o}) for layer, o in zip((one, other), zeroed))
    params = quantize(replace(model.params, layers=layers), Scheme("x", (("o_proj", name),)))
    got, nothing = (np.asarray(decode(layer.attention.o)) for layer in params.layers)
    assert np.isfinite(got).all()
    assert np.abs(got[3]).max() <= (0.002 if name == "nf4-dq" else 0)  # whose scales are near those of their block
    assert got[2].any()
    assert not nothing.any()  # nor NaN, where there is nothing to take a scale from


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ((("down_proj", "w4a16-g128"),), r"mlp\.down_proj: w4a16-g128 cannot hold shape \(128, 192\)"),
        ((("down_proj", "nf4-g128|w4a16-g128"),), r"mlp\.down_proj: w4a16-g128 cannot hold"),
        ((("layers.5.*", "w8a16"),), r"'layers\.5\.\*' matches no weight"),
    ],
)
def test_schemes_that_do_not_fit(model, rules, words, live, tmp_path):
    """Said before anything is done."""
    first = (("qkv_proj", "w8a16"),)
    with pytest.raises(QuantizationError, match=words):
        quantize(model.params, Scheme("x", first + rules))
    save(tmp_path, model.params, model.config)
    with pytest.raises(QuantizationError, match=words):
        jllm.load(tmp_path, quantize=Scheme("x", first + rules))
    assert not live


def test_the_preset_bf16_is_a_dtype_and_a_file_of_that_name_is_not(model, tmp_path):
    save(tmp_path, model.params, model.config)
    assert jllm.load(tmp_path, quantize="bf16").params.dtype == jnp.bfloat16
    with pytest.raises(ConfigError, match="quantize='bf16' and dtype='float32' contradict each other"):
        jllm.load(tmp_path, quantize="bf16", dtype="f32")
    (tmp_path / "bf16.toml").write_text('rules = [["down_proj", "w8a16"]]')
    params = jllm.load(tmp_path, quantize=tmp_path / "bf16.toml", dtype="f32").params
    assert params.dtype == jnp.float32
    assert params.layers[0].mlp.down.format.name == "w8a16"


def test_quantizing_twice_is_refused(model):
    once = quantize(model.params, "w8a16")
    with pytest.raises(QuantizationError, match=r"qkv_proj is quantized already \(w8a16\)"):
        quantize(once, "nf4")


@pytest.mark.parametrize(
    ("rules", "embed", "head"),
    [
        ((("*_proj", "w8a16"),), None, None),
        ((("lm_head", "w8a8"),), None, "w8a8"),
        ((("embed_tokens", "w8a16"),), "w8a16", None),
        ((("embed_tokens", "w8a16"), ("lm_head", "w8a16")), "w8a16", None),
        ((("embed_tokens", "w8a16"), ("lm_head", "bf16")), "w8a16", "same"),
        ((("embed_tokens", "nf4"), ("lm_head", "w8a16")), "nf4", "w8a16"),
        ((("lm_head", "bf16"),), None, None),
    ],
)
@pytest.mark.parametrize("donate", [False, True])
def test_tied_heads(rules, embed, head, donate):
    """A head of its own only where a rule makes it differ from the embedding."""
    model = tiny_model(tie_embeddings=True, **WIDE)
    table = np.asarray(model.params.embed).copy()  # a view would keep donated memory
    params = quantize(model.params, Scheme("x", rules), donate=donate)
    formats = weight_formats(params)
    assert {name: fmt.name for name, fmt in formats.items() if "layers" not in name} == {
        name: fmt for name, fmt in ((EMBED, embed), (HEAD, head)) if fmt not in (None, "same")
    }
    if head is None:
        assert params.head is None
    elif head == "same":
        np.testing.assert_array_equal(params.head, table)
    else:
        assert_same_bits(params.head, encode(jnp.asarray(table), parse_weight_format(head)))
    assert isinstance(params.embed, QuantizedWeight) == (embed is not None)
    jax.block_until_ready(params)
