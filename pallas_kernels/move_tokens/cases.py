"""Lists shapes of move_tokens that tests and benchmarks share."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.cases import pairwise, random_pages, random_tables
from pallas_kernels.formats.kv_pages import KVPages


@dataclass(frozen=True)
class Case:
    """Describes one call: each of `rows` sequences accepted some of Q = `moves` nodes of a tree, every fourth none."""

    rows: int
    moves: int
    layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    k_format: str
    v_format: str
    context: int = 40  # most tokens before the tree
    spare: int = 2  # pages that no sequence has

    @property
    def nodes(self) -> int:
        """Counts a tree's nodes, the root included."""
        return 2 * self.moves + 1

    def indices(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns page_table, source and target. A sequence's tree lies behind its tokens, and its e-th accepted node
        becomes the e-th token after these. The rest of a row is no move: -1, or from a place to itself."""
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, self.context, self.rows, endpoint=True)
        table = random_tables(rng, self.num_pages, (tokens + self.nodes).tolist(), self.page_size)
        shape = self.rows, self.moves
        target = tokens[:, None] + np.arange(1, self.moves + 1)
        accepted = np.sort([rng.permutation(self.nodes - 1)[: self.moves] + 1 for _ in range(self.rows)], axis=1)
        source = tokens[:, None] + accepted.reshape(shape)
        count = np.where(np.arange(self.rows) % 4 == 3, 0, rng.integers(1, self.moves, self.rows, endpoint=True))
        rest = np.where(rng.random(shape) < 0.5, -1, target)
        source = np.where(np.arange(self.moves) < count[:, None], source, rest)
        return table, source.astype(np.int32), target.astype(np.int32)

    @property
    def num_pages(self) -> int:
        """Returns N."""
        return self.rows * -(-(self.context + self.nodes) // self.page_size) + self.spare

    def inputs(self, seed: int = 0) -> tuple[tuple[KVPages], jax.Array, jax.Array, jax.Array]:
        """Returns the pools of one model, page_table, source and target."""
        rng, formats = np.random.default_rng(seed), (self.k_format, self.v_format)
        sizes = self.layers * self.num_pages, self.num_kv_heads, self.page_size, self.head_dim
        made = random_pages(rng, *sizes, formats)
        pages = KVPages(*(replace(part, layers=self.layers) for part in (made.k, made.v)))
        table, source, target = (jnp.asarray(x) for x in self.indices(seed))
        return (pages,), table, source, target


CASES = tuple(
    Case(
        rows=5,
        moves=4,
        layers=2,
        num_kv_heads=settings["heads"][1],
        **{name: settings[name] for name in ("head_dim", "page_size", "k_format", "v_format")},
    )
    for settings in pairwise()
)

BENCH_CASES = tuple(
    Case(rows, 5, 32, num_kv_heads, 128, 16, name, name, context=1000)
    for num_kv_heads in (32, 8)
    for name in ("bf16", "fp8", "int8-g8", "int4-g32")
    for rows in (1, 16, 64)
)
