"""Quantizes rows from their definition in float64 numpy, for the references."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.quantized_rows import QuantizedRows


def quantize_rows(x: np.ndarray, kind: str, group: int | None = None) -> QuantizedRows:
    """Returns codes and scales [...], or [..., E / group], of x [..., E]. The scales are rounded to float32 unless x is
    float64."""
    if group is not None:
        rows = quantize_rows(x.reshape(*x.shape[:-1], -1, group), kind)
        return QuantizedRows(rows.values.reshape(x.shape), rows.scales)
    largest = {"int8": 127, "fp8": 448}[kind]
    wide = x.astype(np.float64)
    scales = np.maximum(np.abs(wide).max(axis=-1) / largest, 2.0**-126)
    scaled = wide / scales[..., None]
    codes = np.rint(scaled).astype(np.int8) if kind == "int8" else scaled.astype(jnp.float8_e4m3fn)
    kept = scales if x.dtype == np.float64 else scales.astype(np.float32)
    return QuantizedRows(jnp.asarray(codes), jnp.asarray(kept))
