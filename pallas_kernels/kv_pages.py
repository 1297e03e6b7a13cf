"""Paged KV storage: the layout that all attention kernels share, its formats, and their encoding.

One layer keeps K and V each as a pool of N pages: values [N, K, P, D], so that one page of one head is one contiguous
copy. Quantized formats add float16 scales [N, K, P * G], G = D / group: flat, because a copy engine wants every stride
but the last to be a multiple of 16 bytes. int4 packs two values a byte along D: values are uint8 [N, K, P, D / 2].
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

FLOATS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class KVFormat:
    """How K or V is stored: a float type, or "int8"/"int4" with one scale per `group` values along D."""

    dtype: str
    group: int | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """K or V of one layer."""

    values: jax.Array  # [N, K, P, D]; int4: uint8 [N, K, P, D/2]
    scales: jax.Array | None  # float16 [N, K, P*G], or None for float formats
    format: KVFormat = field(metadata={"static": True})

    @property
    def num_pages(self) -> int:
        return self.values.shape[0]

    @property
    def page_size(self) -> int:
        return self.values.shape[2]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """The KV cache of one layer."""

    k: Pages
    v: Pages
