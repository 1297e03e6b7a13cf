"""Lists shapes of cache_update that tests and benchmarks share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.cases import normal, pairwise, random_pages
from pallas_kernels.formats.kv_pages import KVPages


@dataclass(frozen=True)
class Case:
    """Describes one call: `rows` tokens go to distinct random slots of `num_pages` pages, the last `dropped` ones
    nowhere."""

    rows: int
    dropped: int
    num_pages: int
    heads: tuple[int, int]  # H, K
    head_dim: int
    page_size: int
    k_format: str
    v_format: str
    dtype: str

    def inputs(self, seed: int = 0) -> tuple[jax.Array | KVPages, ...]:
        """Returns q, k, v, cos, sin, pages, page and offset: standard normal values, random angles."""
        rng = np.random.default_rng(seed)
        num_heads, num_kv_heads = self.heads
        angles = rng.uniform(-np.pi, np.pi, (self.rows, self.head_dim // 2))
        formats = (self.k_format, self.v_format)
        pages = random_pages(rng, self.num_pages, num_kv_heads, self.page_size, self.head_dim, formats)
        slots = rng.permutation(self.num_pages * self.page_size)[: self.rows]
        page, offset = slots // self.page_size, slots % self.page_size
        page[self.rows - self.dropped :] = self.num_pages + np.arange(self.dropped) * 1000
        cos, sin = (jnp.asarray(wave(angles).astype(np.float32)) for wave in (np.cos, np.sin))
        q, k, v = (
            normal(rng, (self.rows, heads, self.head_dim), self.dtype)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        return q, k, v, cos, sin, pages, jnp.asarray(page, jnp.int32), jnp.asarray(offset, jnp.int32)


CASES = tuple(
    Case(rows=12, dropped=2, num_pages=6, **{key: value for key, value in settings.items() if key != "window"})
    for settings in pairwise()
)

BENCH_CASES = tuple(
    Case(
        rows=rows,
        dropped=0,
        num_pages=4096,
        heads=(32, num_kv_heads),
        head_dim=128,
        page_size=16,
        k_format=name,
        v_format=name,
        dtype="bfloat16",
    )
    for num_kv_heads in (32, 8)
    for name in ("bf16", "fp8", "int8-g8", "int4-g32")
    for rows in (1, 32, 128, 512, 8192)
)
