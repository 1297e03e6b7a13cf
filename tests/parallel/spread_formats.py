"""A weight scheme of each kind, and every kind of KV format, on two devices: logits of one device to rounding, in
float64."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jllm.model.backbone import Packed, packed_logits
from jllm.model.linear import linear
from jllm.model.model import Model
from jllm.model.params import WeightEntry
from jllm.model.shards import share
from jllm.parallel.mesh import make_mesh, spread
from jllm.quant.quantize import quantize, weight_formats
from jllm.step.batch import PromptChunk, ragged_batch
from jllm.step.forward import forward
from jllm.step.state import init_state
from pallas_kernels.all_reduce import MeshAxis
from pallas_kernels.formats.kv_formats import LARGEST_CODE, parse_format
from pallas_kernels.formats.quantized_weights import encode
from pallas_kernels.formats.weight_formats import WeightFormat, parse_weight_format
from tests.parallel.meshes import model_of, on_mesh

jax.config.update("jax_enable_x64", True)
SIZES = {"num_layers": 1, "head_dim": 32}  # columns of o and down are two groups of 128 or more
# Scales of rows, tensors and groups, zeros, tables, scales of scales, blocks of small floats, and each kind of inputs.
SCHEMES = [
    "bf16", "w8a16", "w8a8", "w8a8-head", "w8a8-groups", "w8a8-tensor", "w4a16-g128", "w4a16-g32-zp", "nf4-dq",
    "fp4-g32", "fp8", "uint8-zp", "llm-int8", "iq4nl-dq", "mxfp4", "mxfp8-e5m2-h", "nvfp4", "mxfp8-weight",
    "nvfp4-h-weight", "w8a16-g32-zp", "w8a8-act-g32",
]  # fmt: skip
PROMPT = list(range(5, 25))
TOKENS = jnp.asarray(PROMPT, jnp.int32)
BATCH = Packed(TOKENS, jnp.arange(20, dtype=jnp.int32), jnp.zeros(20, jnp.int32))
packed = partial(jax.jit, static_argnums=1)(packed_logits)
paged = partial(jax.jit, static_argnames="config")(forward)


def near(found: jax.Array, wanted: jax.Array) -> bool:
    assert np.isfinite(wanted).all()
    return np.allclose(found, wanted, rtol=0, atol=1e-10 * np.abs(wanted).max())


def one_scale_a_row(fmt: WeightFormat) -> bool:
    """Whether inputs of o and down have one scale for all their columns, so that parts have others."""
    return fmt.activations == "nvfp4" or (fmt.row_codes is not None and fmt.row_group is None)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights(scheme):
    model = model_of(**SIZES)
    model = replace(model, params=quantize(model.params, scheme))
    found, one = (packed(m.params, m.config, BATCH) for m in (on_mesh(model, 2), model))
    formats = [fmt for name, fmt in weight_formats(model.params).items() if name.endswith(("o_proj", "down_proj"))]
    if any(map(one_scale_a_row, formats)):
        assert not near(found, one)
        one = packed(model.params, replace(model.config, activation_parts=2), BATCH)
    assert near(found, one)


def parses(name: str) -> bool:
    try:
        return bool(parse_format(name, SIZES["head_dim"]))
    except ValueError:
        return False


GROUPED = (f"{codes}-g8{zeros}" for codes, zeros in product(LARGEST_CODE, ("", "-zp")))
PLAIN = [name + end for name, end in product(("bf16", "f32", "fp8", *GROUPED), ("", "-h")) if parses(name + end)]
PAIRS = [("kivi2-g8-r8", "int2-g8-zp"), ("kivi4-g8-r16", "f64"), *zip(PLAIN[::2], PLAIN[1::2], strict=True)]
USUAL = ["kivi2-g8-r8", "kivi4-g8-r16", "bf16", "fp8", "int8-g8", "int4-g8-zp"]  # a pair of each kind
RARE = [pytest.param(pair, marks=pytest.mark.exhaustive) for pair in PAIRS if pair[0] not in USUAL]


def logits(model: Model, kv_cache: str) -> np.ndarray:
    """Of a prompt's chunk and of the token that is decoded after it, beside another prompt's chunk."""
    state = init_state(model.config, slots=2, num_pages=6, page_size=8, kv_cache=kv_cache)
    rows = []
    for slot, tokens in ((0, PROMPT), (1, PROMPT[::-1])):
        batch = ragged_batch([PromptChunk(slot, tokens, pages=[3 * slot, 3 * slot + 2, 3 * slot + 1])], decodes=[0])
        state, found = paged(model.params, state, batch, config=model.config)
        rows.append(found.values[1 - slot :])  # in the first step nothing is decoded
        slots = replace(state.slots, length=jnp.asarray([20, 0], jnp.int32), done=jnp.asarray([False, True]))
        state = replace(state, slots=slots)
    return np.concatenate(rows)


@pytest.mark.parametrize("pair", [*(pair for pair in PAIRS if pair[0] in USUAL), *RARE], ids=":".join)
def test_keys_and_values(pair):
    model, name = model_of(**SIZES), "k={},v={}".format(*pair)
    wanted = logits(model, name)
    assert wanted.shape == (3, model.config.vocab_size)
    assert near(logits(on_mesh(model, 2), name), wanted)


@pytest.mark.parametrize("scheme", ["fp8", "llm-int8-t1", "nvfp4-h", "w8a8-act-g32"])
def test_deterministic_products_have_whole_rows_scales(scheme):
    """Of inputs that four devices have a part of each, the first of which has the largest."""
    rng = np.random.default_rng(3)
    x, w = (jnp.asarray(rng.normal(size=shape)) for shape in ((5, 256), (64, 256)))
    x = x.at[:, :64].multiply(3)
    coded = encode(w, parse_weight_format(scheme))
    entry = WeightEntry("matrix", (("o_proj", "embed"),), "heads head_dim")
    config = spread(model_of(head_dim=32).config, make_mesh(4))
    shares = share(coded, entry, config)

    def product(backend):
        own = lambda w, x: linear(x, jax.tree.map(lambda leaf: leaf[0], w), axis=MeshAxis("model"), backend=backend)  # noqa: E731
        specs = {"in_specs": (P("model"), P(None, "model")), "out_specs": P()}
        return jax.jit(jax.shard_map(own, mesh=config.mesh, **specs, check_vma=False))(shares, x)

    wanted = np.asarray(linear(x, coded, backend="deterministic"))
    np.testing.assert_allclose(product("deterministic"), wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())
    if "-g" not in scheme:
        assert np.abs(np.asarray(product(None)) - wanted).max() > 1e-3, "parts have scales of their own"
