"""Scales of K and V that were found ahead, one number each in a layer, folded into weights as a checkpoint is read.

A cache with them holds K / k_scale and V / v_scale. So k_proj's rows are divided by k_scale and q_proj's take it, and
scores stay as they are; v_proj's rows are divided by v_scale and o_proj's take it, and so does the output. Biases of
queries, keys and values go along. Where queries and keys have norms, the weights of these take what their rows would.
One scale of all of o_proj's inputs is divided, too: its codes stay. A cache in a float format then holds what one with
scales would, but that K is divided before it is rounded to the model's dtype, which makes no difference for powers of
two.
"""

from collections.abc import Collection, Mapping

import numpy as np

from jllm.quant.codes import positive_scale

_ENDS = {"k_proj.k_scale": "k", "v_proj.v_scale": "v"}


def scale_names(stored: Collection[str]) -> tuple[str, ...]:
    """Returns those of the stored tensors that are such scales."""
    return tuple(name for name in stored if name.endswith(tuple(f".{end}" for end in _ENDS)))


def tensor_factors(scales: Mapping[str, np.ndarray], stored: Collection[str]) -> dict[str, np.float32]:
    """Returns what stored tensors' values are multiplied by, by name, of scales by theirs; none for scales of 1. Names
    of tensors that do not exist may be among them. Raises CheckpointError for a scale that nothing can be divided
    by."""
    factors: dict[str, np.float32] = {}
    for name, array in scales.items():
        scale = positive_scale(name, array)[0]
        if scale == 1:
            continue
        end = next(end for end in _ENDS if name.endswith(end))
        at, back = name.removesuffix(end), np.float32(1) / scale
        if _ENDS[end] == "v":
            factors |= {f"{at}v_proj.weight": back, f"{at}v_proj.bias": back, f"{at}o_proj.weight": scale}
            factors[f"{at}o_proj.input_scale"] = back
        elif f"{at}k_norm.weight" in stored:
            factors |= {f"{at}q_norm.weight": scale, f"{at}k_norm.weight": back}
        else:
            factors |= {
                f"{at}{x}_proj.{end}": by for x, by in (("q", scale), ("k", back)) for end in ("weight", "bias")
            }
    return factors
