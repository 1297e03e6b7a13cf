"""What an imported checkpoint may have wrong: one line that names the tensor or the field, what was found and
what would do."""

import re
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import jllm
from jllm.errors import CheckpointError
from tests.files.importers import layouts
from tests.files.importers.layouts import (
    autofp8,
    awq,
    block_floats,
    compressed,
    fp8_blocks,
    gptq,
    llm_int8,
    modelopt,
    modelopt_fp8,
    nf4,
)

Q, K, O = (f"model.layers.0.self_attn.{x}_proj" for x in "qko")
packed = partial(compressed, form="pack-quantized", activations=False, bits=4, strategy="group", group=32)
static = partial(compressed, static=True)
act = partial(gptq, desc_act=True)
nvfp4, mxfp4 = (partial(block_floats, kind=kind) for kind in ("nvfp4", "mxfp4"))
ct_blocks = partial(fp8_blocks, by="compressed-tensors")
E4M3 = ml_dtypes.float8_e4m3fn


def fails(tmp_path, layout, change, message):
    def changed(weights):
        written = layout(weights)
        change(written)
        return written

    layouts.write(tmp_path / "m", layouts.small_model(), changed)
    with pytest.raises(CheckpointError, match=message) as caught:
        jllm.load(tmp_path / "m")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "m") in str(caught.value)


def config(**fields):
    return lambda written: written.config.update(fields)


def group(**fields):
    return lambda written: written.config["config_groups"]["group_0"].update(fields)


def weights(**fields):
    return lambda written: written.config["config_groups"]["group_0"]["weights"].update(fields)


def inputs(**fields):
    return lambda written: written.config["config_groups"]["group_0"]["input_activations"].update(fields)


def without(*names):
    return lambda written: [written.config.pop(name) for name in names]


def drop(name):
    return lambda written: written.tensors.pop(name)


def put(name, value):
    return lambda written: written.tensors.update({name: value})


def edit(name, change):
    def apply(written):
        array = written.tensors[name].copy()
        written.tensors[name] = array if (new := change(array)) is None else new

    return apply


def first(value):
    """Sets a tensor's first value."""

    def change(array):
        array.reshape(-1)[0] = value

    return change


def reshaped(octets):
    """Another shape of as many values, in what bitsandbytes says of a weight."""
    said = octets.tobytes()
    assert b"[64, 64]" in said
    return np.frombuffer(said.replace(b"[64, 64]", b"[32, 128]"), np.uint8)


UNSUPPORTED = {
    "method": (gptq, config(quant_method="quip"), "'quip' is not supported; supported are jllm, gptq, awq"),
    "no method": (gptq, config(quant_method=[]), r"quant_method \[\] is not supported"),
    "gptq-3": (gptq, config(bits=3), "bits = 3 .* supported: 4, 8"),
    "gptq-group": (gptq, config(group_size=12), "group_size = 12 .* supported: -1, or a multiple of 8"),
    "gptq-marlin": (gptq, config(checkpoint_format="marlin"), 'checkpoint_format = "marlin" .* "gptq", "gptq_v2"'),
    "gptq-marlin-flag": (gptq, config(is_marlin_format=True), "is_marlin_format = true"),
    "gptq-pattern": (gptq, config(dynamic={"-:(": {}}), r"'\(' is not a regular expression"),
    "gptq-names": (gptq, config(modules_in_block_to_quantize="all"), 'quantize = "all" .* a list of names'),
    "awq-8": (awq, config(bits=8), "bits = 8 .* supported: 4"),
    "awq-fast": (awq, config(version="gemv_fast"), 'version = "gemv_fast" .* supported: "gemm", "gemv"'),
    "awq-gemv": (awq, config(version="gemv", group_size=48), "group_size = 48 .* with version gemv"),
    "ct-format": (compressed, config(format="marlin-24"), 'format = "marlin-24" .*"mxfp8-quantized"'),
    "ct-blocks": (nvfp4, weights(num_bits=8), "num_bits = 8 .* supported: 4"),
    "ct-block-size": (nvfp4, weights(group_size=32), "group_size = 32 .* supported: 16"),
    "ct-block-inputs": (nvfp4, inputs(dynamic=True), 'dynamic = true .* supported: "local"'),
    "ct-mx-inputs": (mxfp4, inputs(strategy="token"), 'strategy = "token" .* supported: "group"'),
    "modelopt-algo": (modelopt, config(quant_algo="W4A8_AWQ"), 'quant_algo = "W4A8_AWQ" .* supported: "NVFP4", "FP8"'),
    "modelopt-kv": (modelopt, config(kv_cache_scheme={"num_bits": 4}), "kv_cache_scheme = .* supported: null, or"),
    "ct-static": (compressed, inputs(dynamic=False), 'strategy = "token" .* supported: "tensor"'),
    "ct-local": (compressed, inputs(dynamic="local"), 'dynamic = "local" .* supported: true, false'),
    "ct-tensor": (compressed, inputs(strategy="tensor"), 'strategy = "tensor" .* supported: "token"'),
    "ct-asymmetric": (compressed, inputs(symmetric=False), "symmetric = false is not supported"),
    "ct-kv": (compressed, config(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme = .* supported: null"),
    "ct-block": (compressed, weights(strategy="block"), 'strategy = "block" is not supported'),
    "ct-bits": (compressed, weights(num_bits=4), "num_bits = 4 .* supported: 8"),
    "ct-type": (compressed, weights(type="float"), 'type = "float" .* supported: "int"'),
    "ct-outputs": (compressed, group(output_activations={"num_bits": 8}), "output_activations"),
    "ct-w4a8": (packed, group(input_activations={"num_bits": 8}), "input_activations = .* where weights are packed"),
    "ct-sparse": (compressed, config(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
    "ct-groups": (compressed, config(config_groups={}), "config_groups"),
    "fp8-scheme": (autofp8, config(activation_scheme="token"), 'activation_scheme = "token" .*"dynamic", "static"'),
    "fp8-block": (autofp8, config(weight_block_size=[64, 64]), r"size = \[64, 64\] .*supported: null, \[128, 128\]"),
    "fp8-block-scales": (fp8_blocks, config(scale_fmt="ue8m0"), 'scale_fmt = "ue8m0" .*supported: "float"'),
    "fp8-block-static": (fp8_blocks, config(activation_scheme="static"), 'scheme = "static" .*supported: "dynamic"'),
    "fp8-block-grid": (
        fp8_blocks, put(f"{O}.weight_scale_inv", np.ones((1, 2), np.float32)), r"shape \[1, 2\], .*\[1, 1\]"
    ),
    "fp8-block-nan": (fp8_blocks, edit(f"{O}.weight_scale_inv", first(np.nan)), f"{O}: its scales hold NaN"),
    "ct-blocks-size": (ct_blocks, weights(block_structure=[64, 128]), r"block_structure = \[64, 128\] .*\[128, 128\]"),
    "ct-blocks-inputs": (ct_blocks, inputs(strategy="token"), 'strategy = "token" .*supported: "group"'),
    "ct-blocks-plain": (ct_blocks, group(input_activations=None), 'strategy = null .*supported: "group"'),
    "bnb-af4": (nf4, config(bnb_4bit_quant_type="af4"), 'bnb_4bit_quant_type = "af4" .* supported: "nf4", "fp4"'),
    "bnb-fp4": (nf4, config(bnb_4bit_quant_type="fp4"), "bitsandbytes__fp4 is missing"),
    "bnb-threshold": (llm_int8, config(llm_int8_threshold=-1), "llm_int8_threshold = -1 .* a number, 0 or more"),
    "bnb-neither": (nf4, config(load_in_4bit=False), "one of load_in_4bit and load_in_8bit"),
}  # fmt: skip
DISAGREE = {
    "gptq-qzeros": (gptq, drop(f"{Q}.qzeros"), f"1 of .* missing, by its quantization_config, the first is {Q}.qzeros"),
    "gptq-qweight": (gptq, drop(f"{Q}.qweight"), f"tensor {Q}.qweight is missing: .* no exception for {Q}"),
    "gptq-g_idx": (act, drop(f"{Q}.g_idx"), f"missing.* {Q}.g_idx"),
    "gptq-bits": (gptq, config(bits=8), rf"{Q}.qweight has shape \[8, 64\], but .* says \[16, 64\]"),
    "gptq-groups": (gptq, config(group_size=16), rf"{Q}.qzeros has shape \[2, 8\], but .* says \[4, 8\]"),
    "gptq-columns": (gptq, config(group_size=64), "down_proj: its 96 columns are not a multiple of the group size 64"),
    "gptq-dtype": (gptq, edit(f"{O}.qweight", lambda x: x.astype(np.int64)), f"{O}.qweight is stored as I64"),
    "gptq-order": (gptq, edit(f"{O}.g_idx", lambda x: x[::-1]), f"{O}.g_idx reorders the inputs, but desc_act = false"),
    "gptq-uneven": (act, edit(f"{O}.g_idx", first(7)), f"{O}.g_idx does not put 32 inputs into each of 2 groups"),
    "gptq-lopsided": (act, edit(f"{O}.g_idx", lambda x: x * 0), f"{O}.g_idx does not put 32 inputs into each of 2 "),
    "gptq-orders": (act, edit(f"{K}.g_idx", lambda x: x[::-1]), "qkv_proj is one weight, but the g_idx of .*k_proj"),
    "gptq-sym": (partial(gptq, sym=False), config(sym=True), r"\.qzeros holds zero point \d+, but sym = true"),
    "gptq-v2": (partial(gptq, form="gptq_v2"), config(checkpoint_format="gptq"), "zero point 9, .* is it gptq_v2?"),
    "gptq-v1": (gptq, config(checkpoint_format="gptq_v2"), "zero point 7, .* is it gptq?"),
    "gptq-v2-without-sym": (
        partial(gptq, form="gptq_v2"), without("checkpoint_format", "sym"), 'zero point 9 .* to "gptq_v2", or sym'
    ),
    "gptq-v1-without-sym": (
        partial(gptq, bits=8),
        lambda written: [config(checkpoint_format="gptq_v2")(written), without("sym")(written)],
        'zero point 127 .* to "gptq", or sym',
    ),
    "gptq-bias": (gptq, put(f"{O}.bias", np.ones(64, np.float16)), f"{O}.bias is not zero, but the model has no such"),
    "gptq-nan": (gptq, edit(f"{O}.scales", first(np.nan)), f"{O}: its scales hold NaN or infinity"),
    "gptq-lm_head": (gptq, config(lm_head=True), "tensor lm_head.qweight is missing"),
    "awq-mixed": (partial(awq, plain=("k_proj",)), config(), f"{K} is stored in 16 bits and {Q} quantized; .* alike"),
    "awq-zeros": (awq, config(zero_point=False), r"\.qzeros holds zero point \d+, but zero_point = false implies 8"),
    "awq-plain": (partial(awq, plain=("o_proj",)), config(modules_to_not_convert=None), f"no exception for {O}"),
    "ct-plain": (partial(compressed, ignore=("lm_head", O)), config(ignore=["lm_head"]), f"no exception for {O}"),
    "ct-ignored": (compressed, config(ignore=["lm_head", "re:.*o_proj"]), f"{O}.weight_scale is stored, but"),
    "ct-head": (compressed, config(ignore=[]), "tensor lm_head.weight_scale is missing"),
    "ct-input": (compressed, put(f"{O}.input_scale", np.ones(1, np.float32)), f"no use for, .* {O}.input_scale"),
    "ct-dtype": (compressed, weights(symmetric=False), "input_activations = .* not symmetric"),
    "ct-zeros": (packed, put(f"{O}.weight_zero_point", np.ones((64, 2), np.int8)), "weight_zero_point is not zero"),
    "ct-shape": (packed, put(f"{O}.weight_shape", np.array([64, 60])), rf"{O}.weight_shape holds \[64, 60\], but"),
    "ct-scale": (packed, edit(f"{O}.weight_scale", first(1e30)), f"{O}: its scales reach .*, which is beyond float16"),
    "ct-groups": (packed, weights(group_size=16), rf"{Q}.weight_scale has shape \[64, 2\], but .* says \[64, 4\]"),
    "ct-scale-0": (static, edit(f"{O}.input_scale", first(0)), f"{O}.input_scale holds 0, expected a positive number"),
    "ct-scale-small": (static, edit(f"{O}.input_scale", first(1e-39)), "positive number, 1.2e-38 or more$"),
    "ct-scale-nan": (static, edit(f"{O}.input_scale", first(np.nan)), f"{O}.input_scale holds nan, expected a pos"),
    "ct-zero-point": (static, put(f"{O}.input_zero_point", np.ones(1, np.int8)), f"{O}.input_zero_point is not zero"),
    "ct-no-scale": (static, drop(f"{O}.input_scale"), f"missing, by its quantization_config, .* {O}.input_scale"),
    "ct-scales": (static, put(f"{O}.input_scale", np.ones(2, np.float32)), rf"{O}.input_scale has shape \[2\], but"),
    "ct-block-nan": (nvfp4, edit(f"{O}.weight_scale", first(E4M3(np.nan))), f"{O}: its weight or weight_scale hold"),
    "ct-mx-nan": (mxfp4, edit(f"{O}.weight_scale", first(255)), f"{O}: its weight or weight_scale hold"),
    "ct-global": (nvfp4, edit(f"{O}.weight_global_scale", first(0)), f"{O}.weight_global_scale holds 0, expected"),
    "ct-no-global": (nvfp4, drop(f"{O}.input_global_scale"), f"missing, .* {O}.input_global_scale"),
    "modelopt-plain": (modelopt, drop(f"{O}.weight_scale_2"), f"tensor {O}.weight_scale_2 is missing"),
    "modelopt-ignored": (modelopt, config(ignore=["lm_head", "*.o_proj"]), f"{O}.weight_scale_2 is stored, but"),
    "modelopt-kv-scale": (modelopt_fp8, put(f"{K}.k_scale", np.float32(0)), f"{K}.k_scale holds 0, expected a pos"),
    "modelopt-kv-scales": (modelopt_fp8, put(f"{K}.k_scale", np.ones(2, np.float32)), r"k_scale has shape \[2\], but"),
    "modelopt-no-kv": (modelopt_fp8, config(kv_cache_scheme=None), f"no use for, .*{K}.k_scale"),
    "modelopt-fp8-plain": (modelopt_fp8, drop(f"{O}.weight_scale"), f"tensor {O}.weight_scale is missing"),
    "fp8-static": (autofp8, config(activation_scheme="static"), f"missing.* {Q}.input_scale"),
    "fp8-dynamic": (
        partial(autofp8, static=True), config(activation_scheme="dynamic"), "no use for, .*proj.input_scale"
    ),
    "fp8-nan": (autofp8, edit(f"{O}.weight", first(ml_dtypes.float8_e4m3fn(np.nan))), f"tensor {O}.weight holds NaN"),
    "fp8--nan": (autofp8, edit(f"{O}.weight", first(-ml_dtypes.float8_e4m3fn(np.nan))), f"tensor {O}.weight holds NaN"),
    "fp8-int8": (autofp8, edit(f"{O}.weight", lambda x: x.view(np.int8)), f"{O}.weight is stored as I8, .* F8_E4M3"),
    "nf4-map": (nf4, edit(f"{O}.weight.quant_map", first(-0.9)), f"{O}.weight.quant_map does not hold"),
    "nf4-json": (nf4, edit(f"{O}.weight.quant_state.bitsandbytes__nf4", first(0)), "is not a JSON object"),
    "nf4-transposed": (
        nf4, edit(f"{O}.weight.quant_state.bitsandbytes__nf4", reshaped), r"describes nf4 of shape \[32, 128\]; the"
    ),
    "nf4-absmax": (nf4, edit(f"{O}.weight.absmax", lambda x: x[1:]), "has 63 scales, but .* imply 64"),
    "nf4-nested": (
        partial(nf4, double=True), edit(f"{O}.weight.nested_absmax", lambda x: np.append(x, x)), "has 2 scales, .* 1"
    ),
    "nf4-double": (nf4, config(bnb_4bit_use_double_quant=True), f"missing.* {Q}.weight.nested_absmax"),
    "nf4-single": (partial(nf4, double=True), config(bnb_4bit_use_double_quant=False), "no use for.*nested_"),
    "nf4-shape": (nf4, edit(f"{O}.weight", lambda x: x[1:]), rf"{O}.weight has shape \[2047, 1\], .*2048, 1\]"),
    "int8-format": (llm_int8, put(f"{O}.weight_format", np.array(2, np.uint8)), f"{O}.weight_format is 2"),
    "int8-plain": (llm_int8, drop(f"{O}.SCB"), f"tensor {O}.SCB is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_supported_is_named(case, tmp_path):
    fails(tmp_path, *UNSUPPORTED[case])


@pytest.mark.parametrize("case", DISAGREE)
def test_tensors_that_disagree_with_the_config_are_named(case, tmp_path):
    fails(tmp_path, *DISAGREE[case])


def test_modules_of_one_weight_all_have_a_scale_of_inputs_or_none(tmp_path):
    def layout(given):
        written = compressed(given)
        groups = written.config["config_groups"]
        fixed = compressed({K: given[K]}, static=True, targets=(K,))
        groups["group_1"] = fixed.config["config_groups"]["group_0"]
        written.tensors |= fixed.tensors
        return written

    fails(tmp_path, layout, config(), f"qkv_proj is one weight, but of {Q} and {K} only one has an input_scale")


def test_modules_of_one_weight_must_have_one_format(tmp_path):
    def layout(given):
        written = gptq(given, dynamic={r"+:.*\.k_proj": {"bits": 8}})
        eight = gptq({K: given[K]}, bits=8)
        written.tensors |= eight.tensors
        return written

    message = re.escape(
        f"{Q} is stored as w4a16-g32 and {K} as w8a16-g32; modules that are merged must be stored alike"
    )
    fails(tmp_path, layout, config(), message)
