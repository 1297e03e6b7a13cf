"""Weights on a mesh and the forward pass over them, against one device in float64."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jllm.errors import CheckpointError, ConfigError, QuantizationError
from jllm.files import fingerprint
from jllm.files.load import load
from jllm.files.save import save
from jllm.model.backbone import Packed, packed_logits
from jllm.model.params import matrices, with_matrices
from jllm.model.shards import share_params
from jllm.parallel.mesh import fitting, make_mesh, rank_config, spread
from jllm.quant.quantize import quantize, quantize_weight
from jllm.quant.rotation import quantize_model
from jllm.quant.schemes import parse_formats
from pallas_kernels.all_reduce import MeshAxis, all_reduce
from pallas_kernels.all_reduce.reference import all_reduce as reference
from pallas_kernels.formats.quantized_weights import encode_with, grouped
from pallas_kernels.formats.weight_codes import fit_scales
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.sample.noise import _high as high
from tests.parallel.meshes import model_of, on_mesh
from tests.tiny import with_fields

jax.config.update("jax_enable_x64", True)
TOKENS = jnp.arange(20, dtype=jnp.int32) * 3 % 97
BATCH = Packed(TOKENS, jnp.arange(20, dtype=jnp.int32), jnp.zeros(20, jnp.int32))
forward = partial(jax.jit, static_argnums=1)(packed_logits)


def check(model, devices: int, one=None) -> None:
    one = model if one is None else one
    spread_out = on_mesh(model, devices)
    got, wanted = (forward(m.params, m.config, BATCH) for m in (spread_out, one))
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_logits_are_those_of_one_device(devices):
    check(model_of(), devices)


def test_biases_count_once_and_norms_of_heads_are_whole():
    model, rng = model_of(tie_embeddings=True, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True), np.random
    c, rng = model.config, rng.default_rng(0)

    def vector(size):
        return jnp.asarray(1 + rng.normal(size=size))

    biases = {"qkv_bias": vector((c.num_heads + 2 * c.num_kv_heads) * c.head_dim), "o_bias": vector(c.hidden_size)}
    norms = {"q_norm": vector(c.head_dim), "k_norm": vector(c.head_dim)}
    mlp = {"gate_up_bias": vector(2 * c.intermediate_size), "down_bias": vector(c.hidden_size)}
    layers = tuple(with_fields(layer, biases | norms, mlp) for layer in model.params.layers)
    check(replace(model, params=replace(model.params, layers=layers)), 4)


def test_no_device_has_more_than_its_share():
    model = model_of()
    whole, shared = model.params, on_mesh(model, 8).params
    for old, new in ((whole.embed, shared.embed), (whole.layers[0].mlp.down, shared.layers[0].mlp.down)):
        for part in new.addressable_shards:
            assert part.data.nbytes <= old.nbytes / 8 * 1.1


@pytest.mark.parametrize(("devices", "changes"), [(8, {}), (2, {"tie_embeddings": True})])
def test_weights_have_the_fingerprint_of_the_whole(devices, changes):
    model = model_of("float32", **changes)
    wanted, shared = fingerprint.of_params(model.params), on_mesh(model, devices)
    assert fingerprint.of_shares(shared.params, shared.config) == wanted
    layer = shared.params.layers[1]
    down = layer.mlp.down.at[-1, 3, 5].add(1.0)  # of the last rank's share
    other = replace(shared.params, layers=(shared.params.layers[0], with_fields(layer, mlp={"down": down})))
    assert fingerprint.of_shares(other, shared.config) != wanted


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32-zp", "nf4-dq", "nvfp4", "mxfp4-weight", "fp8-weight"])
def test_quantized_weights_have_the_fingerprint_of_the_whole(scheme):
    """However their codes are packed, and where rows are padded: 97 tokens, and KV heads that two devices share."""
    model = model_of("float32", head_dim=32)
    params = quantize(model.params, scheme)
    model = replace(model, params=replace(params, embed=quantize_weight("embed", params.embed, parse_formats("w8a16"))))
    found, kinds = {fingerprint.of_params(model.params)}, [fingerprint.of_model(model.params, model.config)]
    for devices in (2, 4):
        shared = on_mesh(model, devices)
        found.add(fingerprint.of_shares(shared.params, shared.config))
        kinds.append(fingerprint.of_model(shared.params, shared.config))
        assert kinds[-1] == fingerprint.of_model(model.params, replace(model.config, activation_parts=devices))
    assert len(found) == 1
    assert len({*kinds}) == (3 if scheme == "nvfp4" else 1), "which quantizes inputs by parts"
    w = shared.params.layers[1].mlp.down
    for name in ("values", "scales", "zeros"):
        if (leaf := getattr(w, name)) is not None:  # of the last rank, or of what all have alike, one place on
            rank = -1 if leaf.ndim == 3 else 0
            moved = replace(w, **{name: leaf.at[rank].set(jnp.roll(leaf[rank], 1, axis=-1))})
            layer = with_fields(shared.params.layers[1], mlp={"down": moved})
            other = replace(shared.params, layers=(shared.params.layers[0], layer))
            assert fingerprint.of_shares(other, shared.config) not in found, name


def test_loading_cuts_each_weight_as_it_is_read(tmp_path):
    model = model_of("float32")
    save(tmp_path, model.params, model.config)
    found, wanted = load(tmp_path, mesh=4), on_mesh(model, 4)
    assert found.config.mesh == wanted.config.mesh
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)
    coded = load(tmp_path, mesh=2, quantize="w8a16")
    wanted = on_mesh(replace(model, params=quantize(model.params, "w8a16")), 2)
    jax.tree.map(np.testing.assert_array_equal, coded.params, wanted.params)
    said = r"0.self_attn.o_proj: w8a8-act-g64 .*each of 4 .*_parts 32 inputs;.*32"
    with pytest.raises(QuantizationError, match=said):
        load(tmp_path, quantize="w8a8-act-g64", activation_parts=4)
    groups = replace(model, params=quantize(model.params, "w8a8-act-g64"))
    with pytest.raises(QuantizationError, match=said):
        replace(groups, config=replace(model.config, activation_parts=4))


SAVED = ["bf16", "w8a16", "nf4-dq", "nvfp4"]


@pytest.mark.parametrize(("scheme", "tied"), [*((name, i % 2 == 1) for i, name in enumerate(SAVED)), ("bf16", True)])
def test_what_a_mesh_saves_is_the_whole_model(tmp_path, scheme, tied):
    """Rows that are padded, KV heads that two devices keep alike, codes of four bits, scales of rows and of groups."""
    model = model_of("float32", head_dim=32, tie_embeddings=tied)
    model = replace(model, params=quantize(model.params, scheme))
    params, config = on_mesh(model, 4).params, on_mesh(model, 4).config
    save(tmp_path, params, config, max_shard_bytes=50_000)
    found = load(tmp_path)
    assert found.config == model.config
    assert fingerprint.of_model(found.params, found.config) == fingerprint.of_model(model.params, model.config)
    np.testing.assert_array_equal(*(forward(m.params, m.config, BATCH) for m in (found, model)))


def test_an_order_of_inputs_is_saved_by_a_mesh(tmp_path):
    model = model_of("float32")
    layer = model.params.layers[0]
    order = jnp.asarray(np.random.default_rng(0).permutation(layer.mlp.down.shape[1]), jnp.int32)
    coded = quantize(model.params, "w4a16-g32")
    down = replace(coded.layers[0].mlp.down, columns=order)
    coded = replace(coded, layers=(with_fields(coded.layers[0], mlp={"down": down}), *coded.layers[1:]))
    shared = on_mesh(replace(model, params=coded), 2)
    save(tmp_path, shared.params, shared.config)
    assert fingerprint.of_params(load(tmp_path).params) == fingerprint.of_params(coded)


def test_params_of_another_mesh_are_not_saved(tmp_path):
    two, four = on_mesh(model_of("float32"), 2), on_mesh(model_of("float32"), 4)
    with pytest.raises(
        CheckpointError, match=r"params.embed has shape \[2, 49, 64\], but the config says \[4, 25, 64\]"
    ):
        save(tmp_path, two.params, four.config)
    assert not list(tmp_path.iterdir())


def test_the_exchange_gives_every_device_the_same_bits():
    rng = np.random.default_rng(1)
    parts, bias, residual = rng.normal(size=(8, 5, 64)), rng.normal(size=64), rng.normal(size=(5, 64))

    def one(x):
        added = {"bias": jnp.asarray(bias, x.dtype), "residual": jnp.asarray(residual, x.dtype)}
        return all_reduce(x[0], MeshAxis("model"), **added)[None]

    over = jax.shard_map(one, mesh=make_mesh(8), in_specs=P("model"), out_specs=P("model"), check_vma=False)
    for dtype, bound in (("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 2e-2)):
        found = np.asarray(jax.jit(over)(jnp.asarray(parts, dtype)))
        assert all(row.tobytes() == found[0].tobytes() for row in found)
        rounded = [np.asarray(jnp.asarray(part, dtype)) for part in parts]
        wanted = reference(rounded, bias, residual)
        assert np.linalg.norm(found[0].astype(np.float64) - wanted) < bound * np.linalg.norm(wanted)


def test_the_exchange_adds_in_the_order_of_devices():
    parts = jnp.asarray(np.random.default_rng(2).normal(size=(8, 5, 64)), jnp.float32)
    one = partial(all_reduce, axis=MeshAxis("model"), backend="deterministic")
    over = jax.shard_map(
        lambda x: one(x[0])[None], mesh=make_mesh(8), in_specs=P("model"), out_specs=P("model"), check_vma=False
    )
    wanted = np.zeros((5, 64), np.float32)
    for part in np.asarray(parts):
        wanted = wanted + part
    found = np.asarray(jax.jit(over)(parts))
    assert all(row.tobytes() == wanted.tobytes() for row in found)
    backwards = np.asarray(jax.jit(over)(parts[::-1]))
    assert backwards[0].tobytes() != wanted.tobytes()


def test_a_mesh_that_does_not_fit():
    config = model_of().config
    assert fitting(config) == [1, 2, 4, 8]
    assert fitting(replace(config, num_kv_heads=8, intermediate_size=36)) == [1, 2, 4]
    with pytest.raises(ConfigError, match=r"3 devices cannot share 8 heads.* can: 1, 2, 4, 8$"):
        spread(config, make_mesh(3))
    with pytest.raises(ConfigError, match="9 devices asked for, and there are 8: ask for 1 to 8"):
        make_mesh(9)
    with pytest.raises(ConfigError, match="each listed once"):
        make_mesh(jax.devices()[:1] * 2)
    with pytest.raises(ConfigError, match="has the axes a, b: expected one, 'model'"):
        spread(config, Mesh(np.asarray(jax.devices()).reshape(4, 2), ("a", "b")))
    two = SimpleNamespace(
        axis_names=("model",), devices=np.asarray([SimpleNamespace(device_kind=k) for k in ("A", "B")])
    )
    with pytest.raises(ConfigError, match=r"the mesh has different devices \(A, B\): expected one kind"):
        spread(config, two)
    with pytest.raises(ConfigError, match="is for one device"):
        spread(replace(config, activation_parts=2), make_mesh(2))
    with pytest.raises(ConfigError, match="activation_parts is 3, but must divide num_heads"):
        replace(config, activation_parts=3)


def test_formats_that_cannot_be_cut():
    model, config = model_of(), spread(model_of().config, make_mesh(4))
    params = quantize(model.params, "nf4")
    with pytest.raises(QuantizationError, match=r"layers.0.self_attn.o_proj: nf4 has groups of 64, .* 8, 16, 32 would"):
        share_params(params, config)
    groups = quantize(model.params, "w8a8-groups")
    with pytest.raises(QuantizationError, match="o_proj: w8a8-act-g128 has groups of 128, .* groups of 32 would fit"):
        share_params(groups, config)


@pytest.mark.parametrize(("devices", "name"), [(8, "w4a16-g32"), (4, "mxfp4")])
def test_an_order_of_inputs_of_its_own(devices, name):
    """As GPTQ's with activation order has: any input may be in any group, and so on any device. Blocks of small floats
    are rounded before."""
    model, rng = model_of(head_dim=32), np.random.default_rng(1)
    fmt = parse_weight_format(name)

    def ordered(w):
        scales, zeros = fit_scales(grouped(w, fmt), fmt)
        return encode_with(w, scales, zeros, fmt, columns=jnp.asarray(rng.permutation(w.shape[1]), jnp.int32))

    layers = tuple(with_matrices(layer, jax.tree.map(ordered, matrices(layer))) for layer in model.params.layers)
    model = replace(model, params=replace(model.params, layers=layers))
    check(model, devices)
    shared = on_mesh(model, devices)
    assert fingerprint.of_shares(shared.params, shared.config) == fingerprint.of_params(model.params)


@pytest.mark.parametrize(
    ("scheme", "tied"), [("w8a16+rotate-kv", False), ("w4a16-g32+rotate-all", True), ("w8a8-groups", False)]
)
def test_rotated_and_quantized_as_on_one_device(tmp_path, scheme, tied):
    """And with groups that fit each part, where those of the scheme would be cut."""
    model = model_of("float32", tie_embeddings=tied)
    save(tmp_path, model.params, model.config)
    found = load(tmp_path, mesh=4, quantize=scheme)
    one = load(tmp_path, quantize=scheme, activation_parts=4)
    wanted = share_params(one.params, replace(found.config, tie_embeddings=one.config.tie_embeddings))
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted)
    assert found.config.tie_embeddings == one.config.tie_embeddings


ABSTRACT = ["w4a16-g32", "w8a8-head", "nf4-dq", "nvfp4", "w8a16+rotate-kv", "w4a16-g32+rotate-all"]


@pytest.mark.parametrize("scheme", ABSTRACT)
def test_shapes_alone_are_quantized_as_arrays_are(scheme):
    shared = on_mesh(model_of("float32", head_dim=32, tie_embeddings=True), 4)
    abstract = replace(shared, params=jax.eval_shape(lambda p: p, shared.params))
    made, found = quantize_model(shared, scheme), quantize_model(abstract, scheme)
    assert found.config == made.config
    assert jax.tree.structure(found.params) == jax.tree.structure(made.params)
    for shape, array in zip(jax.tree.leaves(found.params), jax.tree.leaves(made.params), strict=True):
        assert isinstance(shape, jax.ShapeDtypeStruct)
        if shape.sharding is not None:  # what stays as it was has what it came with
            assert shape.sharding == array.sharding
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)


def test_one_device_computes_what_it_did():
    """Without a mesh nothing is exchanged; a rank's program has two exchanges a layer, one more for the embedding, and
    one gathering of logits."""
    model = model_of()
    plain = str(jax.make_jaxpr(packed_logits, static_argnums=1)(model.params, model.config, BATCH))
    assert "psum" not in plain
    assert "all_gather" not in plain
    two = on_mesh(model, 2)
    ranks = str(jax.make_jaxpr(packed_logits, static_argnums=1)(two.params, two.config, BATCH))
    assert ranks.count("all_gather[") == 1
    assert ranks.count("psum") == 3, "two in the one layer that all call, and one of the embedding"
    assert rank_config(model.config) is model.config


def test_high_words_from_halves():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2**32, size=(2, 10_000), dtype=np.uint64)
    a[:3], b[:3] = (0xFFFFFFFF, 0xFFFFFFFF, 0), (0xFFFFFFFF, 1, 5)
    found = high(*(jnp.asarray(x, jnp.uint32) for x in (a, b)))
    np.testing.assert_array_equal(np.asarray(found), (a * b) >> np.uint64(32))
