"""Checkpoints in other projects' layouts: each weight decodes to what the layout's definition says is stored.

Bit for bit, where scales are stored in no more than float16 holds; float32 scales of groups are rounded to it, which
moves a weight by at most 2^-11 of itself.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jllm
from jllm.files.importers import block_floats
from jllm.model.params import matrices
from jllm.quant import codes
from pallas_kernels.formats import quantized_weights
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from tests.files.importers import layouts
from tests.files.importers.layouts import LINEARS, awq, compressed, gptq, nf4

packed = partial(compressed, form="pack-quantized", activations=False)
float8 = partial(compressed, form="float-quantized", kind="float")
decode = jax.jit(quantized_weights.decode)


def saying(layout, **fields):
    """The layout, with other fields in what config_groups say of weights."""

    def write(weights):
        written = layout(weights)
        written.config["config_groups"]["group_0"]["weights"].update(fields)
        return written

    return write


HALF = 2.0**-11
# layout, what its linear layers become, and how far their weights may be off
CASES = {
    "gptq": (gptq, "w4a16-g32", 0),
    "gptq-desc_act": (partial(gptq, desc_act=True), "w4a16-g32", 0),
    "gptq-desc_act-asymmetric": (partial(gptq, desc_act=True, sym=False), "w4a16-g32-zp", 0),
    "gptq-v2": (partial(gptq, sym=False, form="gptq_v2"), "w4a16-g32-zp", 0),
    "gptq-8": (partial(gptq, bits=8, sym=False), "w8a16-g32-zp", 0),
    "gptq-8-channel": (partial(gptq, bits=8, group=-1), "w8a16", 0),
    "gptq-channel": (partial(gptq, group=-1, desc_act=True), None, 0),
    "gptq-bias": (partial(gptq, bias=True), "w4a16-g32", 0),
    "gptq-lm_head": (partial(gptq, lm_head=True), "w4a16-g32", 0),
    "gptq-static": (partial(gptq, static_groups=True, model_file_base_name="model"), "w4a16-g32", 0),
    "awq": (awq, "w4a16-g32-zp", 0),
    "awq-symmetric": (partial(awq, zero_point=False), "w4a16-g32", 0),
    "awq-channel": (partial(awq, group=-1), None, 0),
    "awq-gemv": (partial(awq, version="gemv"), "w4a16-g32-zp", 0),
    "awq-mixed": (partial(awq, plain=("o_proj",)), "w4a16-g32-zp", 0),
    "int8": (compressed, "w8a8", 0),
    "int8-tensor": (partial(compressed, strategy="tensor"), "w8a8", 0),
    "int8-weight": (partial(compressed, activations=False, symmetric=False, form="naive-quantized"), "uint8-zp", 0),
    "int8-groups": (partial(compressed, activations=False, strategy="group", group=32), "w8a16-g32", 0),
    "int8-actorder": (
        partial(compressed, activations=False, strategy="group", group=32, actorder="group"), "w8a16-g32", 0
    ),
    "int8-tensor-older": (saying(partial(compressed, strategy="tensor"), strategy=None), "w8a8", 0),
    "int8-channel-actorder": (saying(compressed, actorder="group"), "w8a8", 0),  # of channels: says nothing
    "fp8": (float8, "fp8", 0),
    "fp8-older": (saying(float8, strategy=None, group_size=-1), "fp8", 0),
    "fp8-tensor": (partial(float8, strategy="tensor", dtype=np.float32), "fp8", 0),
    "fp8-weight": (partial(float8, activations=False), "fp8-weight", 0),
    "fp8-autofp8": (layouts.autofp8, "fp8", 0),
    "fp8-blocks": (layouts.fp8_blocks, "fp8-b128", 0),
    "fp8-blocks-bf16": (partial(layouts.fp8_blocks, dtype=ml_dtypes.bfloat16), "fp8-b128", 0),
    "fp8-blocks-compressed": (partial(layouts.fp8_blocks, by="compressed-tensors"), "fp8-b128", 0),
    "int8-static": (partial(compressed, static=True), "w8a8", 0),
    "fp8-static": (partial(float8, static=True), "fp8", 0),
    "fp8-autofp8-static": (partial(layouts.autofp8, static=True), "fp8", 0),
    "packed-4": (partial(packed, bits=4, strategy="group", group=32), "w4a16-g32", 0),
    "packed-4-zp": (partial(packed, bits=4, strategy="group", group=32, symmetric=False), "w4a16-g32-zp", 0),
    "packed-4-older": (
        partial(packed, bits=4, strategy="group", group=32, symmetric=False, packed_zeros=False), "w4a16-g32-zp", 0
    ),
    "packed-4-actorder": (partial(packed, bits=4, strategy="group", group=32, actorder="group"), "w4a16-g32", 0),
    "packed-4-actorder-true": (
        saying(partial(packed, bits=4, strategy="group", group=32, actorder="group"), actorder=True), "w4a16-g32", 0
    ),
    "packed-4-actorder-dynamic": (  # another word for "group"
        saying(partial(packed, bits=4, strategy="group", group=32, actorder="group"), actorder="dynamic"),
        "w4a16-g32",
        0,
    ),
    "packed-4-actorder-static": (  # another word for "weight": groups are in order
        saying(partial(packed, bits=4, strategy="group", group=32), actorder="static"), "w4a16-g32", 0
    ),
    "packed-4-float32": (partial(packed, bits=4, strategy="group", group=32, dtype=np.float32), "w4a16-g32", HALF),
    "packed-8-channel": (partial(packed, bits=8), "w8a16", 0),
    "nf4": (nf4, None, HALF),
    "nf4-double": (partial(nf4, double=True), None, HALF),
    "nf4-storage": (partial(nf4, storage="bfloat16", block=32), "nf4-g32", HALF),
    "fp4": (partial(nf4, kind="fp4"), None, HALF),
    "fp4-double": (partial(nf4, kind="fp4", double=True), None, HALF),
    "nf4-mixed": (partial(nf4, skip=("down_proj",)), None, HALF),
    "nvfp4": (partial(layouts.block_floats, kind="nvfp4"), "nvfp4", 0),
    "nvfp4-weight": (partial(layouts.block_floats, kind="nvfp4", activations=False), "nvfp4-weight", 0),
    "mxfp4": (partial(layouts.block_floats, kind="mxfp4"), "mxfp4", 0),
    "mxfp8-weight": (partial(layouts.block_floats, kind="mxfp8", activations=False), "mxfp8-weight", 0),
    "modelopt": (layouts.modelopt, "nvfp4", 0),
    "modelopt-older": (partial(layouts.modelopt, older=True), "nvfp4", 0),
    "modelopt-fp8": (layouts.modelopt_fp8, "fp8", 0),
    "modelopt-fp8-older": (partial(layouts.modelopt_fp8, older=True), "fp8", 0),
    "modelopt-fp8-no-kv": (partial(layouts.modelopt_fp8, kv_scale=None), "fp8", 0),
    "llm_int8": (layouts.llm_int8, "llm-int8", 2.0**-22),
    "llm_int8-threshold": (partial(layouts.llm_int8, threshold=4.5), "llm-int8-t4.5", 2.0**-22),
    "llm_int8-no-outliers": (partial(layouts.llm_int8, threshold=0.0), "w8a8", 2.0**-22),
}  # fmt: skip


def merged(model, weights, i=0):
    """The writer's weights as the leaves of one layer, and the head."""
    at = f"model.layers.{i}."
    leaves = {
        field: np.concatenate([weights[at + part] for part, _ in entry.modules]) for field, entry in LINEARS.items()
    }
    return leaves | {"head": weights.get("lm_head")}


def decoded(leaf):
    return np.asarray(decode(leaf) if isinstance(leaf, QuantizedWeight) else leaf)


def furthest(name, path):
    """Loads a case; how far its worst weight is from the writer's, relative to that one."""
    model = layouts.small_model()
    written = layouts.write(path, model, CASES[name][0], shards=2 if "act" in name else 1)
    params = jllm.load(path).params
    leaves = matrices(params.layers[0]) | {"head": params.head}
    worst = 0.0
    for field, weight in merged(model, written.weights).items():
        nonzero = np.where(weight == 0, np.finfo(np.float32).tiny, np.abs(weight))
        worst = max(worst, float((np.abs(decoded(leaves[field]) - weight) / nonzero).max()))
    return worst, params, leaves


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_definition(name, tmp_path):
    fmt, tolerance = CASES[name][1:]
    worst, params, leaves = furthest(name, tmp_path / "m")
    assert worst <= tolerance
    formats = {leaf.format.name for leaf in leaves.values() if isinstance(leaf, QuantizedWeight)}
    assert formats == {fmt} if fmt else formats
    plain = {"awq-mixed": {"o", "head"}, "nf4-mixed": {"down", "head"}, "gptq-lm_head": set()}.get(name, {"head"})
    assert {field for field, leaf in leaves.items() if not isinstance(leaf, QuantizedWeight)} == plain
    reordered = {f for f, leaf in leaves.items() if isinstance(leaf, QuantizedWeight) and leaf.columns is not None}
    assert reordered == (set(LINEARS) if name in REORDERED else set())
    static = {f: leaf.input_scale for f, leaf in leaves.items() if getattr(leaf, "input_scale", None) is not None}
    assert static == ({field: 2.0**-n for field, n in STATIC.items()} if name in FIXED else {})
    for field in ("embed", "norm"):
        assert jnp.array_equal(getattr(params, field), getattr(layouts.small_model().params, field))


OTHER_NAMES = {
    "gptq": gptq,
    "awq": partial(awq, plain=("model.layers.0.self_attn.o_proj",)),
    "compressed": partial(compressed, ignore=("lm_head", "model.layers.0.self_attn.o_proj")),
    "nf4": nf4,
}


@pytest.mark.parametrize("before", ["language_model.model.", "_orig_mod.model.", ""])
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_modules_may_be_named_as_in_the_files(name, before, tmp_path):
    """Those that a config excepts, too."""

    def named(text):
        return before + text.removeprefix("model.") if text.startswith("model.") else f"{before[:-6]}{text}"

    def layout(weights):
        written = OTHER_NAMES[name](weights)
        for key, value in written.config.items():
            written.config[key] = [*map(named, value)] if isinstance(value, list) else value
        return written

    plain, other = tmp_path / "plain", tmp_path / "other"
    layouts.write(plain, layouts.small_model(), OTHER_NAMES[name])
    written = layouts.write(other, layouts.small_model(), layout)
    layouts.save_file(other / "model.safetensors", {named(name): array for name, array in written.tensors.items()})
    one, two = (jax.tree.leaves(jllm.load(path).params) for path in (plain, other))
    assert all(jnp.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("layout", "change", "unknown"),
    [
        (gptq, {"rotation": "hadamard", "meta": {}}, "rotation"),
        (gptq, {"dynamic": {"+:nothing": {"bits": 8, "rotation": 1}}}, r"dynamic\.\+:nothing\.rotation"),
        (awq, {"pre_scale": True}, "pre_scale"),
        (compressed, {"transform_config": {"config_groups": {}}, "version": "0.12"}, "transform_config"),
        (saying(compressed, hadamard=1), {"transform_config": {}}, r"config_groups\.group_0\.weights\.hadamard"),
        (layouts.autofp8, {"rotation": "a", "other": 1}, "other, rotation"),
        (layouts.modelopt, {"pre_quant_scale": True}, "pre_quant_scale"),
        (nf4, {"rotation": [1]}, "rotation"),
    ],
)
def test_unknown_fields_are_named_in_a_warning(layout, change, unknown, tmp_path):
    def changed(weights):
        written = layout(weights)
        written.config |= change
        return written

    layouts.write(tmp_path / "m", layouts.small_model(), changed)
    with pytest.warns(UserWarning, match=f"^{tmp_path / 'm'}: quantization_config: unknown fields .*: {unknown}$"):
        jllm.load(tmp_path / "m")


def swapped(module, x, *rest):
    """Two codes of a byte, exchanged."""
    return codes.group_weight(module, x.reshape(len(x), -1, 2)[..., ::-1].reshape(x.shape), *rest)


def inverted(*args):
    return np.argsort(codes.input_order(*args)).astype(np.int32)


def merged_wrongly(parts):
    """NVFP4's float32 of the first module for those that are merged with it."""
    return codes.merge([replace(part, scale_steps=0 * part.scale_steps + parts[0].scale_steps[0]) for part in parts])


FAULTS = {  # case, what is replaced, by what
    "zero points of version 1 as they are": ("gptq-desc_act-asymmetric", "gptq._ONES", {4: 0, 8: 0}),
    "words of gemm in order": ("awq", "awq._PLACE", np.arange(8)),
    "inputs' order inverted": ("gptq-desc_act", "gptq.input_order", inverted),
    "modules in another order": ("int8", "foreign.merge", lambda parts: codes.merge(parts[::-1])),
    "no offset": ("packed-4", "compressed_tensors.signed", lambda x, bits: x.view(np.int8)),
    "divisors as factors": ("nvfp4", "block_floats.COMPRESSED", replace(block_floats.COMPRESSED, divides=False)),
    "one float32 for all modules": ("modelopt", "foreign.merge", merged_wrongly),
    "low nibble first": ("nf4", "bitsandbytes.group_weight", swapped),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_are_caught(fault, tmp_path, monkeypatch):
    name, place, value = FAULTS[fault]
    monkeypatch.setattr(f"jllm.files.importers.{place}", value)
    assert furthest(name, tmp_path / "m")[0] > 0.01


FIXED = (
    "int8-static", "fp8-static", "fp8-autofp8-static", "nvfp4", "modelopt", "modelopt-older", "modelopt-fp8",
    "modelopt-fp8-older", "modelopt-fp8-no-kv",
)  # fmt: skip
STATIC = {"qkv": 5, "o": 6, "gate_up": 5, "down": 4}
REORDERED = (
    "gptq-desc_act", "gptq-desc_act-asymmetric", "packed-4-actorder", "packed-4-actorder-true", "int8-actorder",
    "packed-4-actorder-dynamic",
)  # fmt: skip
