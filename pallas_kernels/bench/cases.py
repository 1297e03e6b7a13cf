"""Makes inputs that tests and benchmarks build alike, from a seed, in numpy."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.kv_formats import LARGEST_CODE, KVFormat, parse_format
from pallas_kernels.formats.kv_pages import KVPages, Pages

PAGE_SIZES = (8, 16, 32, 64, 128)
FORMATS = (  # K, V: every kind on both sides
    ("bf16", "bf16"),
    ("f32", "f16"),
    ("int8-g8", "int4-g32"),
    ("int4-g8", "int8-g64"),
    ("fp8", "int8-g16"),
    ("int8-g64", "fp8"),
)
HEADS = ((4, 4), (4, 2), (6, 2), (4, 1))  # H, K
WINDOWS = (None, 1, 40, 129)
DTYPES = ("float32", "bfloat16", "float16")
HEAD_DIMS = (64, 128)


def pairwise() -> list[dict[str, Any]]:
    """Returns attention settings in which every two values of different axes meet. Each page size occurs with each pair
    of formats."""

    def pick(axis: Sequence[Any], at: int) -> Any:
        return axis[at % len(axis)]

    return [
        {
            "page_size": page_size,
            "k_format": k_format,
            "v_format": v_format,
            "heads": pick(HEADS, i + j),
            "window": pick(WINDOWS, 3 * i + 2 * j + j // 2),
            "dtype": pick(DTYPES, 2 * i + j),
            "head_dim": pick(HEAD_DIMS, i + j + j // 3),
        }
        for i, page_size in enumerate(PAGE_SIZES)
        for j, (k_format, v_format) in enumerate(FORMATS)
    ]


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Returns standard normal values, rounded to `dtype`."""
    return jnp.asarray(rng.standard_normal(shape).astype(jnp.dtype(dtype)))


def random_pages(
    rng: np.random.Generator, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, formats: tuple[str, str]
) -> KVPages:
    """Returns full pages of K and V as their formats store them. Values use every code, with zero mean and nearly unit
    variance."""

    def pool(fmt: KVFormat) -> Pages:
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        if fmt.group is None:
            stored = rng.standard_normal(shape).astype(jnp.dtype(fmt.dtype)).view(fmt.storage_dtype)
            return Pages(jnp.asarray(stored), None, fmt)
        largest = LARGEST_CODE[fmt.dtype]
        codes = rng.integers(-largest, largest, shape, np.int8, endpoint=True)
        if fmt.dtype == "int4":
            codes = (codes[..., 0::2] & 15 | codes[..., 1::2] << 4).view(np.uint8)
        scales = rng.uniform(0.5, 2.5, (*shape[:2], page_size, fmt.groups(head_dim))) / largest
        if fmt.zero_point:
            zeros = -scales * (largest + 1) + rng.normal(0, 0.1, scales.shape)
            scales = np.concatenate([scales, zeros], axis=-1)
        return Pages(jnp.asarray(codes), jnp.asarray(scales.astype(np.float16)).reshape(*shape[:2], -1), fmt)

    k_format, v_format = (parse_format(name, head_dim) for name in formats)
    return KVPages(pool(k_format), pool(v_format))


def random_tables(rng: np.random.Generator, num_pages: int, lengths: Sequence[int], page_size: int) -> np.ndarray:
    """Returns page tables i32[len(lengths), M] of distinct random pages; what a sequence doesn't need is out of
    range."""
    needed = [-(-length // page_size) for length in lengths]
    free = iter(rng.permutation(num_pages).tolist())
    tables = np.where(rng.random((len(lengths), max(needed) + 1)) < 0.5, -7, 2**30).astype(np.int32)
    for row, count in zip(tables, needed):
        row[:count] = [next(free) for _ in range(count)]
    return tables
