"""Writes small checkpoints in other projects' quantized layouts, word by word from their published definitions.

It shares nothing with the readers in jllm/quant: quantization, packing and dequantization are here in plain numpy, and
each function returns the weights that its layout's definition says are stored. Sources: GPTQModel 7.7
(nn_modules/qlinear/__init__.py, utils/model.py), AutoAWQ 0.2.9 (modules/linear/gemm.py, gemv.py), compressed-tensors
0.20 (compressors/naive_quantized, pack_quantized; nvfp4, mxfp4, mxfp8 as of its main branch), ModelOpt (as vLLM's
quantization/modelopt.py reads it), AutoFP8 (README, checkpoint structure), bitsandbytes 0.50
(functional.py, nn/modules.py).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from jllm.files.hf_config import to_hf
from jllm.model.model import Model
from jllm.model.params import AttentionParams, LayerParams, MLPParams, matrix_entries
from tests.tiny import tiny_model

LINEARS = matrix_entries(LayerParams(AttentionParams, MLPParams))  # by field
NF4_LEVELS = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)  # fmt: skip
FP4_LEVELS = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(
    12
)
# Of a model that was calibrated: modules of the same inputs have the same. Powers of two, which every dtype holds.
INPUT_SCALES = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 2.0**-5)
INPUT_SCALES |= {"o_proj": 2.0**-6, "down_proj": 2.0**-4}
DTYPE_NAMES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64",
}  # fmt: skip


@dataclass
class Written:
    """What a layout makes of a model's linear layers."""

    config: dict[str, Any]  # quantization_config
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # module -> float32 [N, K], as stored


Layout = Callable[[Mapping[str, np.ndarray]], Written]


def small_model(**changes: Any) -> Model:
    """Sizes that all layouts can hold: multiples of 32, and rows that blocks of 64 do not divide (96)."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96, "num_layers": 1}
    return tiny_model(**sizes | changes)


def split(model: Model) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The linear layers by module, and all other tensors by name, as Hugging Face calls them."""
    c, p = model.config, model.params
    q, kv, f = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    linears, others = {}, {"model.embed_tokens.weight": p.embed, "model.norm.weight": p.norm}
    for i, layer in enumerate(p.layers):
        at = f"model.layers.{i}"
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        linears |= {f"{at}.{n}": w for n, w in zip(names, np.split(layer.attention.qkv, [q, q + kv]), strict=True)}
        linears |= {f"{at}.self_attn.o_proj": layer.attention.o, f"{at}.mlp.down_proj": layer.mlp.down}
        linears |= {f"{at}.mlp.gate_proj": layer.mlp.gate_up[:f], f"{at}.mlp.up_proj": layer.mlp.gate_up[f:]}
        if layer.attention.qkv_bias is not None:
            biases = np.split(layer.attention.qkv_bias, [q, q + kv])
            others |= {f"{at}.{n}.bias": b for n, b in zip(names, biases, strict=True)}
        if layer.attention.q_norm is not None:
            others |= {f"{at}.self_attn.{x}_norm.weight": getattr(layer.attention, f"{x}_norm") for x in "qk"}
        others |= {f"{at}.input_layernorm.weight": layer.attention.norm}
        others |= {f"{at}.post_attention_layernorm.weight": layer.mlp.norm}
    if p.head is not None:
        linears["lm_head"] = p.head
    return tuple({n: np.asarray(w, np.float32) for n, w in ws.items()} for ws in (linears, others))


def write(path: Path, model: Model, layout: Layout, *, shards: int = 1, config_file: str | None = None) -> Written:
    """A checkpoint directory in a layout; `config_file` beside config.json takes quantization_config out of it."""
    linears, others = split(model)
    written = layout(linears)
    written.weights = linears | written.weights
    plain = {f"{m}.weight": w for m, w in linears.items() if not stored(written, m)}
    written.tensors = others | plain | written.tensors
    raw = to_hf(model.config)
    path.mkdir(parents=True)
    if config_file is None:
        raw["quantization_config"] = written.config
    else:
        (path / config_file).write_text(json.dumps({k: v for k, v in written.config.items() if k != "quant_method"}))
    (path / "config.json").write_text(json.dumps(raw))
    names = sorted(written.tensors, key=lambda name: name[::-1])  # one module's tensors over several shards
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    files = files if shards > 1 else ["model.safetensors"]
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    for file in files:
        save_file(path / file, {name: written.tensors[name] for name in names if weight_map[name] == file})
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return written


def stored(written: Written, module: str) -> bool:
    return any(name.startswith(f"{module}.") for name in written.tensors)


def save_file(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file of any dtype: a length, a JSON header, the bytes."""
    header, blobs, end = {}, [], 0
    for name, array in tensors.items():
        blobs.append(np.ascontiguousarray(array).tobytes())
        span = [end, end := end + len(blobs[-1])]
        header[name] = {"dtype": DTYPE_NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    with safetensors.safe_open(file, "numpy") as opened:  # the format's own reader takes it
        assert set(opened.keys()) == set(tensors)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned codes [rows, n] -> int32 [rows, n bits / 32]: code i of a word is shifted by i bits."""
    each = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each)))
    words = np.zeros((codes.shape[0], codes.shape[1] // each), np.uint32)
    for i in range(each):
        words |= codes[:, i::each].astype(np.uint32) << np.uint32(i * bits)
    return words.view(np.int32)


def round_groups(
    w: np.ndarray, groups: np.ndarray, bits: int, *, symmetric: bool, dtype: Any = np.float16, least_zero: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """w [N, K] rounded in the groups that its columns are in: unsigned codes [N, K], scales and zeros [N, G]."""
    top, count = 2**bits - 1, int(groups.max()) + 1
    codes, scales = np.zeros(w.shape, np.int64), np.zeros((len(w), count), dtype)
    zeros = np.zeros((len(w), count), np.int64)
    for g in range(count):
        part = w[:, groups == g]
        if symmetric:
            scales[:, g] = 2 * np.abs(part).max(1) / top
            zeros[:, g] = 2 ** (bits - 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, g] = (high - low) / top
            zeros[:, g] = np.clip(np.round(-low / scales[:, g].astype(np.float64)), least_zero, top)
        step, zero = scales[:, g].astype(np.float64)[:, None], zeros[:, g][:, None]
        codes[:, groups == g] = np.clip(np.round(part / step) + zero, 0, top)
    return codes, scales, zeros


def unround(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(code - zero) * scale in float32."""
    return (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups].astype(np.float32)


def in_order(columns: int, group: int) -> np.ndarray:
    return np.arange(columns) // (columns if group == -1 else group)


def gptq(
    weights: Mapping[str, np.ndarray],
    *,
    bits: int = 4,
    group: int = 32,
    sym: bool = True,
    desc_act: bool = False,
    form: str = "gptq",
    lm_head: bool = False,
    bias: bool = False,
    **extra: Any,
) -> Written:
    """qweight [K/8, N] packed along K, qzeros [G, N/8] along N; version 1 takes a one in each field off the word."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act}
    config |= {"checkpoint_format": form, "lm_head": lm_head, "damp_percent": 0.01, "true_sequential": True}
    out = Written(config | extra)
    for module, w in weights.items():
        if module == "lm_head" and not lm_head:
            continue
        groups = in_order(w.shape[1], group)
        if desc_act:  # one order for all modules with the same inputs
            inputs = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "gate_proj": 2, "up_proj": 2}
            rng = np.random.default_rng(inputs.get(module.rpartition(".")[2], len(module) + 10))
            groups = groups[rng.permutation(w.shape[1])]
        codes, scales, zeros = round_groups(w, groups, bits, symmetric=sym)
        words = pack(zeros.T, bits).view(np.uint32)
        if form == "gptq":
            words = words - np.uint32({4: 0x11111111, 8: 0x01010101}[bits])
        out.tensors |= {
            f"{module}.qweight": pack(codes, bits).T,
            f"{module}.qzeros": words.view(np.int32),
            f"{module}.scales": scales.T,
            f"{module}.g_idx": groups.astype(np.int32),
        }
        if bias:  # as AutoGPTQ does where a layer has none
            out.tensors[f"{module}.bias"] = np.zeros(len(w), np.float16)
        out.weights[module] = unround(codes, scales, zeros, groups)
    return out


def awq(
    weights: Mapping[str, np.ndarray],
    *,
    group: int = 32,
    version: str = "gemm",
    zero_point: bool = True,
    plain: tuple[str, ...] = (),
) -> Written:
    """gemm: packed along N, the fields of a word being columns 0, 2, 4, 6, 1, 3, 5, 7. gemv: along K, in order."""
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zero_point, "version": version}
    out = Written(config | {"modules_to_not_convert": list(plain) or None})
    for module, w in weights.items():
        if module == "lm_head" or any(name in module for name in plain):
            continue
        groups = in_order(w.shape[1], group)
        codes, scales, zeros = round_groups(w, groups, 4, symmetric=not zero_point)
        if version == "gemm":
            order = [8 * word + i for word in range(len(w) // 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
            found = {"qweight": pack(codes.T[:, order], 4), "qzeros": pack(zeros.T[:, order], 4), "scales": scales.T}
        else:
            words = -(-zeros.shape[1] // 8)
            words += -words % {32: 4, 64: 2}.get(group, 1)
            wide = [np.pad(x, ((0, 0), (0, 8 * words - x.shape[1]))) for x in (zeros, scales)]
            found = {"qweight": pack(codes, 4), "qzeros": pack(wide[0], 4), "scales": wide[1]}
        out.tensors |= {f"{module}.{name}": array for name, array in found.items()}
        out.weights[module] = unround(codes, scales, zeros, groups)
    return out


def compressed(
    weights: Mapping[str, np.ndarray],
    *,
    form: str = "int-quantized",
    bits: int = 8,
    kind: str = "int",
    strategy: str = "channel",
    group: int | None = None,
    symmetric: bool = True,
    activations: bool = True,
    static: bool = False,
    actorder: str | None = None,
    ignore: tuple[str, ...] = ("lm_head",),
    targets: tuple[str, ...] = ("Linear",),
    packed_zeros: bool = True,
    dtype: Any = ml_dtypes.bfloat16,
    **extra: Any,
) -> Written:
    """One config group; scales [1], [N, 1] or [N, G]; packed values are stored plus 2^(bits-1)."""
    spec = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "group_size": group}
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    inputs |= {"strategy": "tensor", "dynamic": False, "observer": "minmax"} if static else {}
    groups = {"targets": list(targets), "weights": spec | {"dynamic": False, "actorder": actorder}}
    groups |= {"input_activations": inputs if activations else None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    config |= {"config_groups": {"group_0": groups}, "ignore": list(ignore), "kv_cache_scheme": None}
    out = Written(config | extra)
    for module, w in weights.items():
        if module in ignore:
            continue
        groups = in_order(w.shape[1], group or -1)
        if actorder == "group":
            groups = np.random.default_rng(w.shape[1]).permutation(groups)
        if kind == "float":
            top = np.abs(w).max() if strategy == "tensor" else np.abs(w).max(1, keepdims=True)
            scales = np.asarray(top / 448, dtype).reshape(-1, 1)
            values = (w / scales.astype(np.float32)).astype(ml_dtypes.float8_e4m3fn)
            out.weights[module] = values.astype(np.float32) * scales.astype(np.float32)
            found = {"weight": values}
        else:
            rows, where = (w.reshape(1, -1), 0 * in_order(w.size, -1)) if strategy == "tensor" else (w, groups)
            codes, scales, zeros = round_groups(rows, where, bits, symmetric=symmetric, dtype=dtype)
            codes = codes.reshape(w.shape)
            out.weights[module] = unround(codes, scales, zeros, groups)
            found = {"weight": (codes - 2 ** (bits - 1)).astype(np.int8)}
            if not symmetric:
                found["weight_zero_point"] = (zeros - 2 ** (bits - 1)).astype(np.int8)
            if form == "pack-quantized":
                found = {"weight_packed": pack(codes, bits), "weight_shape": np.array(w.shape, np.int64)} | {
                    name: pack(zeros.T, bits).T if packed_zeros else array
                    for name, array in found.items()
                    if name == "weight_zero_point"
                }
        found["weight_scale"] = scales.reshape(1) if strategy == "tensor" else scales
        if actorder == "group":
            found["weight_g_idx"] = groups.astype(np.int32)
        if static:
            found["input_scale"] = np.array([INPUT_SCALES[module.rpartition(".")[2]]], dtype)
        out.tensors |= {f"{module}.{name}": array for name, array in found.items()}
    return out


def autofp8(weights: Mapping[str, np.ndarray], *, static: bool = False, **extra: Any) -> Written:
    """One scale a tensor, of no dimension; lm_head is not quantized."""
    options: dict[str, Any] = {"form": "float-quantized", "kind": "float", "strategy": "tensor", "static": static}
    written = compressed(weights, dtype=np.float32, **options)
    scheme = "static" if static else "dynamic"
    written.config = {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]} | extra
    written.tensors = {n: a.reshape(()) if n.endswith("_scale") else a for n, a in written.tensors.items()}
    return written


def fp8_blocks(weights: Mapping[str, np.ndarray], *, by: str = "fp8", dtype: Any = np.float32) -> Written:
    """Blocks of 128 x 128 with a factor each, as DeepSeek and Qwen have them, or by compressed-tensors."""
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    blocks = args | {"strategy": "block", "block_structure": [128, 128], "dynamic": False}
    groups = {"targets": ["Linear"], "weights": blocks, "output_activations": None}
    groups |= {"input_activations": args | {"strategy": "group", "group_size": 128, "dynamic": True}}
    config = {"config_groups": {"group_0": groups}, "format": "float-quantized", "ignore": ["lm_head"]}
    if by == "fp8":
        config = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    out = Written({"quant_method": by} | config)
    for module, w in weights.items():
        if module == "lm_head":
            continue
        firsts = [range(0, size, 128) for size in w.shape]
        scales = np.array([[np.abs(w[n : n + 128, k : k + 128]).max() for k in firsts[1]] for n in firsts[0]]) / 448
        scales = scales.astype(dtype)
        wide = np.repeat(np.repeat(scales.astype(np.float32), 128, 0), 128, 1)[: w.shape[0], : w.shape[1]]
        values = np.clip(w / wide, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        out.weights[module] = values.astype(np.float32) * wide
        name = "weight_scale_inv" if by == "fp8" else "weight_scale"
        out.tensors |= {f"{module}.weight": values, f"{module}.{name}": scales}
    return out


BLOCKS = {"nvfp4": (4, 16, "tensor_group", "nvfp4-pack-quantized"), "mxfp4": (4, 32, "group", "mxfp4-pack-quantized"),
          "mxfp8": (8, 32, "group", "mxfp8-quantized")}  # fmt: skip


def block_floats(
    weights: Mapping[str, np.ndarray], *, kind: str, activations: bool = True, ignore: tuple[str, ...] = ("lm_head",)
) -> Written:
    """Of compressed-tensors: scales of weights and inputs are divided by their global ones."""
    bits, size, strategy, form = BLOCKS[kind]
    args = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": size, "symmetric": True}
    inputs = args | {"dynamic": "local" if kind == "nvfp4" else True}
    group = {"targets": ["Linear"], "weights": args | {"dynamic": False}, "format": form}
    group |= {"input_activations": inputs if activations else None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    out = Written(config | {"ignore": list(ignore), "kv_cache_scheme": None})
    for module, w in weights.items():
        if module in ignore:
            continue
        blocks = w.reshape(len(w), -1, size)
        top = np.abs(blocks).max(axis=-1)
        found: dict[str, np.ndarray] = {}
        if kind == "nvfp4":
            whole = np.float32(2.0 ** np.floor(np.log2(6 * 448 / top.max())))  # a power of two: its inverse is exact
            stored = (top / 6 * whole).astype(ml_dtypes.float8_e4m3fn)
            scales = stored.astype(np.float32) / whole
            found["weight_global_scale"] = np.array([whole])
            if activations:
                found["input_global_scale"] = np.array([1 / INPUT_SCALES[module.rpartition(".")[2]]], np.float32)
        else:
            exponents = np.floor(np.log2(top)).astype(int) - {4: 2, 8: 8}[bits]
            stored, scales = (exponents + 127).astype(np.uint8), np.float32(2.0) ** exponents
        element, largest = (ml_dtypes.float4_e2m1fn, 6) if bits == 4 else (ml_dtypes.float8_e4m3fn, 448)
        values = np.clip(blocks / scales[..., None], -largest, largest).astype(element)
        out.weights[module] = (values.astype(np.float32) * scales[..., None].astype(np.float32)).reshape(w.shape)
        codes = values.reshape(w.shape)
        if bits == 4:
            pairs = codes.view(np.uint8).reshape(len(w), -1, 2) & 15
            found["weight_packed"] = pairs[..., 0] | pairs[..., 1] << 4
        else:
            found["weight"] = codes
        out.tensors |= {f"{module}.{name}": array for name, array in (found | {"weight_scale": stored}).items()}
    return out


def modelopt(weights: Mapping[str, np.ndarray], *, older: bool = False) -> Written:
    """NVFP4 of ModelOpt: the same codes, and factors of no dimension in place of divisors; `older` as in
    hf_quant_config.json."""
    written = block_floats(weights, kind="nvfp4")
    names = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"}

    def renamed(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
        module, _, end = name.rpartition(".")
        return f"{module}.{names.get(end, end)}", (1 / array).reshape(()) if "global" in end else array

    written.tensors = dict(renamed(*item) for item in written.tensors.items())
    said = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    newer = {"quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.41.0"}}
    written.config = {"quant_method": "modelopt"} | ({"quantization": said} if older else newer)
    return written


def modelopt_fp8(weights: Mapping[str, np.ndarray], *, older: bool = False, kv_scale: float | None = 1.0) -> Written:
    """FP8 of ModelOpt: one scale a tensor, one of its inputs, and of K and V where kv_scale is given."""
    written = autofp8(weights, static=True)
    if kv_scale is not None:
        for x in ("k", "v"):
            written.tensors[f"model.layers.0.self_attn.{x}_proj.{x}_scale"] = np.array(kv_scale, np.float32)
    kv = {"dynamic": False, "num_bits": 8, "type": "float"} if kv_scale is not None else None
    group = {"weights": kv, "input_activations": kv, "targets": ["Linear"]}
    newer = {"quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": kv, "config_groups": {"group_0": group}}
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": kv and "FP8", "exclude_modules": ["lm_head"]}
    written.config = {"quant_method": "modelopt"} | ({"quantization": said} if older else newer)
    return written


def nf4(
    weights: Mapping[str, np.ndarray],
    *,
    kind: str = "nf4",
    block: int = 64,
    double: bool = False,
    storage: str = "uint8",
    skip: tuple[str, ...] = (),
) -> Written:
    """Blocks of the flattened weight, the even code in the high nibble; nested scales by a table, around their mean."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind}
    levels = NF4_LEVELS if kind == "nf4" else FP4_LEVELS
    config |= {"bnb_4bit_use_double_quant": double, "bnb_4bit_quant_storage": storage}
    out = Written(config | {"bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": list(skip) or None})
    for module, w in weights.items():
        if module == "lm_head" or any(module.endswith(name) for name in skip):
            continue
        flat = np.pad(w.reshape(-1), (0, -w.size % block)).reshape(-1, block)
        absmax = np.abs(flat).max(1).astype(np.float32)
        codes = np.abs((flat / absmax[:, None])[..., None] - levels).argmin(-1).reshape(-1)[: w.size]
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(w.shape)}
        found = {"weight": (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None], "weight.quant_map": levels}
        if double:
            table = np.sort(np.random.default_rng(0).uniform(-1, 1, 256)).astype(np.float32)
            offset = absmax.mean()
            spread = np.pad(absmax - offset, (0, -absmax.size % 256)).reshape(-1, 256)
            nested = np.abs(spread).max(1).astype(np.float32)
            index = np.abs((spread / nested[:, None])[..., None] - table).argmin(-1)
            absmax = (table[index] * nested[:, None]).reshape(-1)[: absmax.size] + offset
            found |= {"weight.absmax": index.astype(np.uint8).reshape(-1)[: absmax.size]}
            found |= {"weight.nested_absmax": nested, "weight.nested_quant_map": table}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        else:
            found["weight.absmax"] = absmax
        if storage == "bfloat16":
            found["weight"] = found["weight"].reshape(-1).view(ml_dtypes.bfloat16)[:, None]
        found[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        out.tensors |= {f"{module}.{name}": array for name, array in found.items()}
        out.weights[module] = (levels[codes] * np.repeat(absmax, block)[: w.size]).reshape(w.shape)
    return out


def llm_int8(weights: Mapping[str, np.ndarray], *, threshold: float = 6.0) -> Written:
    """weight int8, SCB the largest magnitude of each row."""
    out = Written({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": threshold})
    for module, w in weights.items():
        if module == "lm_head":
            continue
        scb = np.abs(w).max(1).astype(np.float32)
        codes = np.round(w * 127 / scb[:, None]).astype(np.int8)
        out.tensors |= {f"{module}.weight": codes, f"{module}.SCB": scb}
        out.tensors[f"{module}.weight_format"] = np.array(0, np.uint8)
        out.weights[module] = codes.astype(np.float32) * scb[:, None] / 127
    return out
