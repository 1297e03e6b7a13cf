"""Lists shapes of prefill_attention that tests and benchmarks share."""

from dataclasses import dataclass
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.cases import normal, pairwise, random_pages, random_tables
from pallas_kernels.formats.kv_pages import KVPages


@dataclass(frozen=True)
class Case:
    """Describes one call: chunk b adds q_lens[b] tokens to a sequence that then holds kv_lens[b]; `unused` rows
    follow."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    unused: int
    heads: tuple[int, int]  # H, K
    head_dim: int
    page_size: int
    k_format: str
    v_format: str
    dtype: str
    window: int | None = None

    @property
    def flops(self) -> int:
        """Counts what the products with visible keys take: two of K and two of V a query, key and column."""
        window = max(self.kv_lens) if self.window is None else self.window
        seen = sum(min(kv - i, window) for q, kv in zip(self.q_lens, self.kv_lens) for i in range(q))
        return 4 * self.heads[0] * self.head_dim * seen

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def inputs(self, seed: int = 0) -> tuple[jax.Array, KVPages, jax.Array, jax.Array, jax.Array]:
        """Returns q, pages, page_table, cu_q_lens and kv_lens: standard normal values, shuffled pages, one unowned
        page."""
        rng = np.random.default_rng(seed)
        num_heads, num_kv_heads = self.heads
        num_pages = sum(-(-length // self.page_size) for length in self.kv_lens) + 1
        formats = (self.k_format, self.v_format)
        rows = sum(self.q_lens) + self.unused
        q = normal(rng, (rows, num_heads, self.head_dim), self.dtype)
        pages = random_pages(rng, num_pages, num_kv_heads, self.page_size, self.head_dim, formats)
        table = random_tables(rng, num_pages, self.kv_lens, self.page_size)
        cu_q_lens = jnp.asarray([0, *accumulate(self.q_lens)], jnp.int32)
        return q, pages, jnp.asarray(table), cu_q_lens, jnp.asarray(self.kv_lens, jnp.int32)


# A chunk of one tile and a bit, an empty one, one token far in, the start of a sequence, and unused rows.
CASES = tuple(Case(q_lens=(37, 0, 1, 5), kv_lens=(150, 9, 129, 5), unused=5, **settings) for settings in pairwise())

# Short chunks of many sizes, starts of sequences and continued ones, between two that are not short.
_SHORT = (8, 16, 70, 30, 3, 1, 40, 0, 8, 7, 1, 2, 8, 70), (8, 16, 70, 30, 3, 12, 100, 5, 8, 16, 60, 2, 8, 300)

# What the Mosaic kernel has beyond: full tiles, head dim 256, more rows than one tile's, many keys, and chunks that
# share a tile.
MOSAIC_CASES = tuple(
    Case(
        q_lens=q_lens, kv_lens=kv_lens, unused=3, heads=heads, head_dim=head_dim, page_size=page_size,
        k_format=name, v_format=name, dtype=dtype, window=window,
    )
    for q_lens, kv_lens, heads, head_dim, page_size, name, dtype, window in (
        ((130, 0, 64, 1), (130, 5, 1000, 600), (4, 4), 128, 16, "bf16", "bfloat16", None),
        ((70, 1, 128), (400, 700, 128), (4, 2), 128, 8, "bf16", "bfloat16", 100),
        ((200, 57), (200, 300), (6, 2), 64, 32, "f16", "float16", None),
        ((65, 20), (321, 20), (4, 1), 256, 64, "bf16", "bfloat16", None),
        ((63, 2), (257, 129), (2, 2), 256, 16, "f16", "float16", 65),
        ((130, 0, 64, 1), (130, 5, 1000, 600), (4, 2), 128, 16, "int8-g8", "bfloat16", None),
        ((200, 57), (200, 300), (8, 8), 128, 16, "int8-g128", "float16", None),
        ((70, 1, 128), (400, 700, 128), (4, 4), 128, 8, "int4-g32", "bfloat16", 100),
        ((65, 20), (321, 20), (4, 1), 256, 16, "int8-g64", "bfloat16", None),
        ((63, 2), (257, 129), (2, 2), 256, 32, "fp8", "float16", 65),
        ((65, 20), (321, 20), (4, 2), 64, 16, "f16", "bfloat16", None),
        ((63, 2), (257, 129), (2, 2), 128, 128, "bf16", "float16", 65),
        (*_SHORT, (4, 4), 128, 16, "bf16", "bfloat16", None),
        (*_SHORT, (4, 2), 128, 16, "int8-g8", "bfloat16", None),
        (*_SHORT, (4, 4), 64, 8, "int4-g32", "float16", 9),
        (*_SHORT, (4, 1), 256, 16, "bf16", "bfloat16", None),
    )
)  # fmt: skip

_LLAMA_7B = {"heads": (32, 32), "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
_LLAMA_8B = {"heads": (32, 8), "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
# What the peers were measured on and a long prompt's last chunk. Then, in bf16, shorter and mixed chunks, and many
# short prompts at once.
_CELLS = (((2048,), (2048,)), ((1024,) * 8, (1024,) * 8), ((16384,), (16384,)), ((2048,), (8192,)))
_MORE_CELLS = (((512,) * 8, (512,) * 8), ((512,), (8192,)), ((1500, 300, 200, 48), (1500, 300, 4096, 2048)))
_SHORT_CELLS = tuple(((tokens,) * prompts,) * 2 for prompts, tokens in ((512, 8), (128, 8), (256, 32), (64, 114)))
# Decoded rows that attend as prompts do, for the trainer's bits: just past a part, and long ones.
ROW_CELLS = (((1,) * 64, (1040,) * 64), ((1,), (8192,)), ((1,), (32768,)))
BENCH_CASES = tuple(
    Case(q_lens=q_lens, kv_lens=kv_lens, unused=0, k_format=name, v_format=name, **shape)  # type: ignore[arg-type]
    for shape, names, cells in (
        (_LLAMA_7B, ("bf16",), (*_CELLS, *_MORE_CELLS, *_SHORT_CELLS)),
        (_LLAMA_7B, ("int8-g8", "fp8", "int4-g32"), _CELLS[1:]),
        (_LLAMA_7B, ("int8-g8",), _SHORT_CELLS[:1]),
        (_LLAMA_7B, ("bf16", "int8-g8"), ROW_CELLS[:1]),
        (_LLAMA_8B, ("bf16", "int8-g8"), (_CELLS[1], _CELLS[3], *ROW_CELLS)),
    )
    for name in names
    for q_lens, kv_lens in cells
)
