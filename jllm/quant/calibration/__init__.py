"""Post-training quantization beyond rounding: pure functions over a model and calibration tokens.

    from jllm.quant import calibration as ptq
    tokens = own_tokens(model, rows=32, length=256)  # of jllm.analysis.own_tokens; or any text's, i32[B, T]
    params = ptq.gptq(model, "w4a16-g64", tokens)
    better = replace(model, params=params)  # serves, saves and loads as rounded weights do

Each returns Params with QuantizedWeight leaves in the formats of the scheme, no larger than rounding's; where a rule
says so, embedding and head are rounded. Models must not be quantized yet. Memory beyond the model: the calibration
tokens' residual stream, and what one layer needs.
"""

from jllm.quant.calibration.inputs import InputStats, layer_statistics
from jllm.quant.calibration.rotation_learning import learn_rotation
from jllm.quant.calibration.scale_learning import learned, tune_scales
from jllm.quant.calibration.scale_search import awq
from jllm.quant.calibration.smoothing import smooth, smooth_attention, smoothquant
from jllm.quant.calibration.solver import gptq, mr_gptq

__all__ = [
    "InputStats",
    "awq",
    "gptq",
    "layer_statistics",
    "learn_rotation",
    "learned",
    "mr_gptq",
    "smooth",
    "smooth_attention",
    "smoothquant",
    "tune_scales",
]
