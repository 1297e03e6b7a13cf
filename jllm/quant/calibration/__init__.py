"""Quantizes after training beyond rounding: pure functions over a model and calibration tokens.

    from jllm.quant import calibration as ptq
    tokens = own_tokens(model, rows=32, length=256)  # of jllm.analysis.own_tokens; or any text's, i32[B, T]
    params = ptq.gptq(model, "w4a16-g64", tokens)
    better = replace(model, params=params)  # serves, saves and loads as rounded weights do

Each function returns Params with QuantizedWeight leaves in the formats of the scheme, no larger than those of rounding.
Embedding and head are rounded if a rule names them. Models must not be quantized yet. Memory beyond the model is the
calibration tokens' residual stream and the needs of one layer.
"""

from typing import NoReturn

from jllm.quant.calibration.inputs import InputStats, layer_statistics
from jllm.quant.calibration.scale_search import awq
from jllm.quant.calibration.smoothing import smooth, smooth_attention, smoothquant
from jllm.quant.calibration.solver import gptq, mr_gptq

__all__ = [
    "InputStats",
    "awq",
    "gptq",
    "layer_statistics",
    "mr_gptq",
    "smooth",
    "smooth_attention",
    "smoothquant",
]

GONE = {  # removed names -> better successors
    "learned": "gptq or awq",
    "tune_scales": "gptq or awq",
    "learn_rotation": 'jllm.quant.rotation.rotate(model, "all")',
}


def __getattr__(name: str) -> NoReturn:
    if name in GONE:
        raise ImportError(f"{__name__}.{name} is gone: use {GONE[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
