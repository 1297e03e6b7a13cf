"""Folds stored scales of K and V, one value each in a layer, into weights as a checkpoint is read.

A cache with such scales holds K / k_scale and V / v_scale. So k_proj's rows are divided by k_scale and q_proj's are
multiplied by it: scores stay the same. v_proj's rows are divided by v_scale, and o_proj's are multiplied by it: the
output stays the same. Biases of queries, keys and values change alike. If queries and keys have norms, the norms'
weights change instead of the rows. A single scale of all o_proj's inputs is divided too: its codes stay.

A cache in a float format then holds the same values as one with scales, with one difference. K is divided before it is
rounded to the model's dtype, which makes no difference for powers of two.
"""

from collections.abc import Collection, Mapping

import numpy as np

from jllm.quant.codes import positive_scale

_ENDS = {"k_proj.k_scale": "k", "v_proj.v_scale": "v"}


def scale_names(stored: Collection[str]) -> tuple[str, ...]:
    """Returns the stored tensors that are scales of K or V."""
    return tuple(name for name in stored if name.endswith(tuple(f".{end}" for end in _ENDS)))


def tensor_factors(scales: Mapping[str, np.ndarray], stored: Collection[str]) -> dict[str, np.float32]:
    """Returns factors of stored tensors' values, by name, for scales by name; none for scales of 1.

    Names may include tensors that do not exist. Raises CheckpointError for a scale that cannot divide.
    """
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
