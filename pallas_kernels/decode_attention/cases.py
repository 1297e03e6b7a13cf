"""Lists shapes of decode_attention that tests and benchmarks share."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.cases import normal, pairwise, random_pages, random_tables
from pallas_kernels.formats.kv_pages import KVPages


@dataclass(frozen=True)
class Case:
    """Describes one call: a segment of `width` rows a sequence of `lengths`."""

    lengths: tuple[int, ...]
    heads: tuple[int, int]  # H, K
    head_dim: int
    page_size: int
    k_format: str
    v_format: str
    dtype: str
    window: int | None = None
    width: int = 1  # Q

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def inputs(self, seed: int = 0) -> tuple[jax.Array, KVPages, jax.Array, jax.Array]:
        """Returns q, pages, page_table and lengths: normal values, shuffled pages, and one page that no sequence
        owns."""
        rng = np.random.default_rng(seed)
        num_heads, num_kv_heads = self.heads
        num_pages = sum(-(-length // self.page_size) for length in self.lengths) + 1
        formats = (self.k_format, self.v_format)
        q = normal(rng, (len(self.lengths) * self.width, num_heads, self.head_dim), self.dtype)
        pages = random_pages(rng, num_pages, num_kv_heads, self.page_size, self.head_dim, formats)
        table = random_tables(rng, num_pages, self.lengths, self.page_size)
        return q, pages, jnp.asarray(table), jnp.asarray(self.lengths, jnp.int32)


# Around page and block edges, and one unused row.
CASES = tuple(Case(lengths=(130, 1, 0, 64, 257), **settings) for settings in pairwise())

_LLAMA_7B = {"heads": (32, 32), "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
_LLAMA_8B = {"heads": (32, 8), "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
# What the peers were measured on, and long batches in every kind of format.
_CELLS = ((1, 1024), (1, 16384), (16, 1024), (64, 1024), (128, 2048), (256, 512))
SHORT_CELLS = ((64, 1024), (128, 2048))
BENCH_CASES = tuple(
    Case(lengths=(length,) * batch, k_format=name, v_format=name, **shape)  # type: ignore[arg-type]
    for shape in (_LLAMA_7B, _LLAMA_8B)
    for name in ("bf16", "fp8", "int8-g8", "int8-g128", "int4-g32")
    for batch, length in (_CELLS if name == "bf16" else SHORT_CELLS)
)
# What a zero a token and head, and a rotation, cost beside the same codes: formats that are timed where they are named.
VARIANTS = ("int4-g128", "int4-g128-zp", "int8-g128-zp", "int4-g32-h", "int4-g32-zp")
VARIANT_CASES = tuple(
    Case(lengths=(length,) * batch, k_format=name, v_format=name, **shape)  # type: ignore[arg-type]
    for shape in (_LLAMA_7B, _LLAMA_8B)
    for name in VARIANTS
    for batch, length in SHORT_CELLS
)
# Segments of drafts, beside one row.
SEGMENT_CASES = tuple(
    dataclasses.replace(case, width=width)
    for case in BENCH_CASES
    if case.k_format in ("bf16", "int8-g8")
    for width in (1, 2, 4, 8)
)
# Equally many keys: in sequences of one length, in a long one among short ones, and in lengths by Zipf's law.
_ROWS, _KEYS = 64, 32768 + 63 * 512
_ZIPF = [int(_KEYS / rank / sum(1 / r for r in range(1, _ROWS + 1))) for rank in range(1, _ROWS + 1)]
_ZIPF[0] += _KEYS - sum(_ZIPF)
UNIFORM = Case(lengths=(_KEYS // _ROWS,) * _ROWS, k_format="bf16", v_format="bf16", **_LLAMA_7B)  # type: ignore[arg-type]
SKEWED = {
    name: dataclasses.replace(UNIFORM, lengths=lengths)
    for name, lengths in {"1 x 32768, 63 x 512": (32768, *(512,) * 63), "by Zipf's law": tuple(_ZIPF)}.items()
}
