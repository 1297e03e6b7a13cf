"""Layers of other kinds: each of tests/layer_kinds is one file, and the library serves, quantizes and loads it."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jllm.analysis.activations import tap
from jllm.errors import CheckpointError, ConfigError, EvaluationError, QuantizationError
from jllm.files.fit import weight_bytes
from jllm.files.load_params import load_params
from jllm.files.save import save
from jllm.model.backbone import Packed, packed_logits
from jllm.model.mlp import mlp_block
from jllm.model.model import Model
from jllm.model.param_specs import init_params, param_specs
from jllm.model.params import AttentionParams, LayerParams, MLPParams, matrices, matrix_modules, tree_bytes
from jllm.model.taps import Tap
from jllm.quant import calibration
from jllm.quant.quantize import quantize, weight_formats
from jllm.quant.schemes import Scheme, find_scheme, scheme_of
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from tests.checkpoint_cases import assert_same_bits
from tests.layer_kinds.experts import ExpertsConfig, ExpertsParams
from tests.layer_kinds.unrotated import UnrotatedConfig, UnrotatedParams
from tests.tiny import CONFIG, full_logits, greedy, one_size, serve

KINDS = [ExpertsConfig, UnrotatedConfig]
IDS = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def model(kind, **changes) -> Model:
    """Random weights, scaled such that each block matters."""
    config = kind(**{field.name: getattr(CONFIG, field.name) for field in fields(CONFIG)} | changes)
    params = init_params(config, jax.random.key(0))
    return Model(config, jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf * 10, params))


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def toy(request) -> Model:
    return model(request.param, num_layers=3)


def test_parts_are_of_their_kinds_and_the_table_gives_shapes_and_initial_values():
    E, F = CONFIG.hidden_size, CONFIG.intermediate_size
    experts = init_params(model(ExpertsConfig).config, jax.random.key(0))
    assert [type(layer.mlp) for layer in experts.layers] == [MLPParams, ExpertsParams]
    assert {type(layer.attention) for layer in experts.layers} == {AttentionParams}
    mlp = experts.layers[1].mlp
    assert (mlp.router.shape, mlp.gate_up.shape, mlp.down.shape) == ((2, E), (4 * F, E), (E, 2 * F))
    assert float(mlp.gate_up.std()) == pytest.approx(0.02, rel=0.05)
    assert float(mlp.down.std()) == pytest.approx(0.01, rel=0.05)  # two layers write four times to the stream
    assert (mlp.norm == 1).all()
    unrotated = model(UnrotatedConfig).params.layers
    assert {type(layer.attention) for layer in unrotated} == {UnrotatedParams}
    assert "q_norm" not in {field.name for field in fields(unrotated[0].attention)}


def test_a_token_goes_to_one_expert():
    """By the formula, in numpy."""
    m = model(ExpertsConfig)
    rng = np.random.default_rng(0)
    x, p, eps = rng.normal(size=(40, 32)).astype(np.float32), m.params.layers[1].mlp, m.config.norm_eps
    got = mlp_block(p, jnp.asarray(x), config=m.config, backend="xla", tap=Tap(()))
    router, gate_up, down = (np.asarray(w, np.float64) for w in (p.router, p.gate_up, p.down))
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + eps)
    gate, up = gate_up.reshape(2, 2, -1, 32)
    seen = set()
    for row, y, residual in zip(normed, np.asarray(got), x):
        likes = np.exp(router @ row)
        expert = likes.argmax()
        hidden = gate[expert] @ row / (1 + np.exp(-gate[expert] @ row)) * (up[expert] @ row)
        want = residual + down.reshape(32, 2, -1)[:, expert] @ hidden * likes[expert] / likes.sum()
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
        seen.add(int(expert))
    assert seen == {0, 1}


def test_without_rotary_positions_do_not_matter():
    def logits(m, positions):
        tokens = jnp.asarray(IDS, jnp.int32)
        batch = Packed(tokens, jnp.asarray(positions, jnp.int32), jnp.zeros_like(tokens))
        return np.asarray(packed_logits(m.params, m.config, batch))

    plain, other = np.arange(len(IDS)), np.arange(len(IDS)) ** 2
    m = model(UnrotatedConfig)
    np.testing.assert_array_equal(logits(m, plain), logits(m, other))
    rotated = model(type(CONFIG))
    assert np.abs(logits(rotated, plain) - logits(rotated, other)).max() > 1e-3


def test_the_engine_serves_what_a_forward_without_a_cache_gives(toy):
    (done,) = serve(toy, [IDS], [greedy(12)], **one_size(2, tokens=2), num_pages=8)
    logits = full_logits(toy, [*IDS, *done.token_ids])
    assert done.token_ids == tuple(logits[len(IDS) - 1 : -1].argmax(axis=1).tolist())
    assert len(set(done.token_ids)) > 3


def test_one_lowered_layer_for_each_kind(toy):
    shape = jax.ShapeDtypeStruct((8,), jnp.int32)
    lower = jax.jit(packed_logits, static_argnames="config").lower
    text = lower(toy.params, toy.config, Packed(*[shape] * 3)).as_text()
    assert text.count("func private @_layer") == (2 if isinstance(toy.config, ExpertsConfig) else 1)


def store(folder, m: Model) -> None:
    """The tensors of a checkpoint under the names that the table says, merged modules apart."""
    tensors, start = {}, 0
    for spec, leaf in zip(jax.tree.leaves(param_specs(m.config)), jax.tree.leaves(m.params), strict=True):
        start = 0
        for name, rows in spec.parts:
            tensors[name] = np.asarray(leaf[start : start + rows])
            start += rows
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("scheme", [None, "w8a16"])
def test_files(toy, tmp_path, scheme):
    store(tmp_path, toy)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    if isinstance(toy.config, ExpertsConfig):
        assert stored["model.layers.2.mlp.experts.up_proj.weight"].shape == (96, 32)
        assert "model.layers.0.mlp.gate_proj.weight" in stored
    loaded = load_params(tmp_path, toy.config, scheme=None if scheme is None else find_scheme(scheme))
    assert_same_bits(loaded, toy.params if scheme is None else quantize(toy.params, scheme))
    with pytest.raises(ConfigError, match=f"config.json cannot describe a {type(toy.config).__name__}"):
        save(tmp_path / "new", toy.params, toy.config)


def test_a_file_of_another_kind_is_refused(tmp_path):
    store(tmp_path, model(ExpertsConfig))
    with pytest.raises(CheckpointError, match=r"missing, the first is model\.layers\.1\.mlp\.gate_proj\.weight"):
        load_params(tmp_path, model(UnrotatedConfig).config)


def test_schemes_find_its_weights(toy):
    params = quantize(toy.params, "w8a16")
    linears = {name for name in matrix_modules(toy.params) if name.endswith("_proj")}
    assert set(weight_formats(params)) == linears
    assert len(linears) == 4 * 3
    got, want = (full_logits(replace(toy, params=p), IDS) for p in (params, toy.params))
    assert 1e-5 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.05
    assert weight_bytes(toy.config, "float32", "w8a16").total == tree_bytes(params)


def test_rules_for_experts():
    params = model(ExpertsConfig, num_layers=3).params
    names = [f"model.layers.{i}.mlp.experts.down_proj" for i in (1, 2)]
    rules = (("experts.gate_proj", "bf16"), ("experts.up_proj", "bf16"), ("mlp.experts.*", "fp8"), ("router", "w8a16"))
    found = weight_formats(quantize(params, Scheme("x", rules)))
    assert {name for name, fmt in found.items() if fmt.name == "fp8"} == set(names)
    assert scheme_of(found, matrix_modules(params)).rules == (
        ("model.layers.*.mlp.router", "w8a16"),
        ("model.layers.*.mlp.experts.down_proj", "fp8"),
    )
    with pytest.raises(QuantizationError, match="matches no weight; near ones: .*expert"):
        quantize(params, Scheme("x", (("mlp.expert.down_proj", "fp8"),)))


def test_calibration_reads_the_inputs_that_the_table_names():
    m = model(ExpertsConfig)
    tokens = np.random.default_rng(0).integers(97, size=(2, 16))
    params = calibration.gptq(m, Scheme("x", (("experts.*", "w4a16-g16"),)), tokens)
    assert isinstance(params.layers[1].mlp.down, QuantizedWeight)
    assert params.layers[0].mlp.down is m.params.layers[0].mlp.down
    stats = list(calibration.layer_statistics(m, tokens, gram=False))
    assert [set(found) for found in stats] == [set(matrices(layer)) for layer in m.params.layers]
    with pytest.raises(QuantizationError, match="ExpertsParams: no scale can move out of 'gate_up'"):
        calibration.smooth(m, tokens)
    with pytest.raises(QuantizationError, match=r"self_attn\.qkv_proj: its inputs have no tap"):
        calibration.gptq(model(UnrotatedConfig), "w8a16", tokens)


def test_a_type_without_a_block_is_an_error():
    m = model(UnrotatedConfig, num_layers=1)
    layer = m.params.layers[0]
    swapped = replace(m.params, layers=(LayerParams(layer.mlp, layer.attention),))
    with pytest.raises(NotImplementedError, match="MLPParams has no attention_block"):
        full_logits(replace(m, params=swapped), IDS)


def test_a_tap_that_a_kind_lacks_is_an_error():
    m = model(ExpertsConfig)
    assert set(tap(m, IDS, ["layers.*.silu_mul"])) == {"layers.0.silu_mul", "layers.1.silu_mul"}
    with pytest.raises(EvaluationError, match=r"tap layers\.1\.gate_up: this kind of layer has no such value"):
        tap(m, IDS, ["layers.*.gate_up"])
