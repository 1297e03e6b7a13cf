"""Make tests/data/written: one tiny model as other packages quantize and write it, and what they decode it to.

    pip install torch transformers accelerate compressed-tensors bitsandbytes nvidia-modelopt requests
    python tests/data/make_written.py

The tests read its results and need none of these packages: torch alone, which all of them stand on, is gigabytes. Each
written/<case>/ has config.json and model.safetensors as the package left them, and decoded.npz: float32 [N, K] by name
of linear layer, what the package says is stored, in float32 and not in the model's dtype. plain/ is the model itself,
in bfloat16. versions.json says what wrote them.
"""

import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import modelopt.torch.quantization as mtq
import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize

OUT = Path(__file__).parent / "written"
KEPT = ("config.json", "hf_quant_config.json", "model.safetensors")
Decoded = dict[str, torch.Tensor]


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 1}


def plain(to: Path, sizes: dict[str, int] = SIZES) -> None:
    """Random weights of unequal rows, so that blocks differ."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=64,
        tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape) * torch.rand(len(weight), 1) * 0.2)
    model.save_pretrained(to)


def compressed(scheme: str, from_: Path, to: Path) -> Decoded:
    """compressed-tensors by a preset's name; scales of the largest magnitude, as its own functions make them."""
    model = AutoModelForCausalLM.from_pretrained(from_, dtype=torch.bfloat16)
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in [m for m in model.modules() if getattr(m, "quantization_scheme", None)]:
        args, weight = module.quantization_scheme.weights, module.weight.data.float()
        blocks = weight.reshape(len(weight), -1, args.group_size)
        whole = None
        if hasattr(module, "weight_global_scale"):
            whole = module.weight_global_scale.data = generate_gparam(weight.min(), weight.max())
            module.input_global_scale.data = torch.full((1,), 64.0)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=whole)
        module.weight_scale.data = scale
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(to)
    compressor.update_config(to)
    return dict(decompressed(model))


def decompressed(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, module in model.named_modules():
        if scheme := getattr(module, "quantization_scheme", None):
            scale = module.weight_scale.data
            scale = (decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale).float()
            if hasattr(module, "weight_packed"):
                rows, half = module.weight_packed.shape
                codes = unpack_fp4_from_uint8(module.weight_packed.data, rows, 2 * half, dtype=torch.float32)
            else:
                codes = module.weight.data.float()
            whole = getattr(module, "weight_global_scale", None)
            options = {"global_scale": whole, "dtype": torch.float32}
            yield name, dequantize(x_q=codes, scale=scale, args=scheme.weights, **options)


def bitsandbytes(options: dict[str, object], from_: Path, to: Path) -> Decoded:
    config = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(
        from_, quantization_config=config, device_map="cpu", dtype=torch.bfloat16
    )
    model.save_pretrained(to)
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if (state := getattr(weight, "quant_state", None)) is not None:
            state.dtype = torch.float32
            found[name] = dequantize_4bit(weight.data, state)
        elif (absmax := getattr(weight, "SCB", None)) is not None:
            found[name] = weight.data.float() * absmax[:, None] / 127
    return found


def fine_grained(sizes: dict[str, int], from_: Path, to: Path) -> Decoded:
    """fp8 in blocks by transformers' own operation, of a model whose sizes are blocks. What its loader decodes."""
    plain(to, sizes)
    options = FineGrainedFP8Config()
    rounding = Fp8Quantize(SimpleNamespace(quantization_config=options))
    tensors: Decoded = {}
    for name, tensor in load_file(to / "model.safetensors").items():
        tensors |= rounding.convert({name: tensor}) if name.endswith("_proj.weight") else {name: tensor}
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((to / "config.json").read_text()) | {"quantization_config": options.to_dict()}
    (to / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    how = {"quantization_config": FineGrainedFP8Config(dequantize=True), "dtype": torch.float32}
    decoded = AutoModelForCausalLM.from_pretrained(to, **how).state_dict()
    return {name.removesuffix(".weight"): w for name, w in decoded.items() if name.endswith("_proj.weight")}


def modelopt(config: str, from_: Path, to: Path) -> Decoded:
    model = AutoModelForCausalLM.from_pretrained(from_, dtype=torch.bfloat16)
    model = mtq.quantize(model, getattr(mtq, config), lambda model: model(torch.arange(3, 30)[None]))
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=to)
    file = safe_open(to / "model.safetensors", "pt")
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = {}
    for name, scale in tensors.items():
        if name.endswith(".weight_scale"):
            module, codes = name.removesuffix(".weight_scale"), tensors[name.removesuffix("_scale")]
            if codes.dtype == torch.uint8:
                stored = NVFP4QTensor(torch.Size((len(codes), 2 * codes.shape[1])), torch.bfloat16, codes)
                double = tensors[f"{module}.weight_scale_2"]
                options = {"scale": scale, "double_scale": double, "block_sizes": {-1: 16}}
                found[module] = stored.dequantize(dtype=torch.float32, **options)
            else:
                found[module] = codes.float() * scale
    return found


FP4, NF4 = ({"load_in_4bit": True, "bnb_4bit_quant_type": kind} for kind in ("fp4", "nf4"))
CASES: dict[str, tuple[Callable[..., Decoded], object]] = {
    "compressed-nvfp4": (compressed, "NVFP4"),
    "compressed-mxfp4": (compressed, "MXFP4"),
    "compressed-mxfp8": (compressed, "MXFP8"),
    "modelopt-nvfp4": (modelopt, "NVFP4_DEFAULT_CFG"),
    "modelopt-fp8": (modelopt, "FP8_DEFAULT_CFG"),
    "bitsandbytes-fp4": (bitsandbytes, FP4),
    "bitsandbytes-fp4-dq": (bitsandbytes, FP4 | {"bnb_4bit_use_double_quant": True}),
    "bitsandbytes-nf4": (bitsandbytes, NF4),
    "bitsandbytes-int8": (bitsandbytes, {"load_in_8bit": True}),
    "transformers-fp8-blocks": (
        fine_grained, {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 64}
    ),
}  # fmt: skip
PACKAGES = ("torch", "transformers", "compressed-tensors", "bitsandbytes", "nvidia-modelopt")


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        plain(Path(folder) / "plain")
        for case, (make, what) in CASES.items():
            decoded = make(what, Path(folder) / "plain", Path(folder) / case)
            (OUT / case).mkdir(parents=True)
            np.savez_compressed(OUT / case / "decoded.npz", **{name: w.numpy() for name, w in decoded.items()})
        for case in ("plain", *CASES):
            (OUT / case).mkdir(exist_ok=True)
            for name in KEPT:
                if (Path(folder) / case / name).exists():
                    shutil.copy(Path(folder) / case / name, OUT / case / name)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    (OUT / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
