"""Lists shapes of causal_attention that tests and benchmarks share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.cases import normal


@dataclass(frozen=True)
class Case:
    """Describes one call: segments of these lengths, one after the other."""

    segments: tuple[int, ...]
    heads: tuple[int, int]  # H, K
    head_dim: int
    dtype: str
    window: int | None = None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def inputs(self, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns q, k, v and segments: standard normal values, segment ids 0, 1, .."""
        rng = np.random.default_rng(seed)
        rows = sum(self.segments)
        q, k, v = (
            normal(rng, (rows, heads, self.head_dim), self.dtype)
            for heads in (self.heads[0], self.heads[1], self.heads[1])
        )
        ids = np.repeat(np.arange(len(self.segments)), self.segments)
        return q, k, v, jnp.asarray(ids, jnp.int32)


CASES = (
    Case((20, 1, 12), (4, 4), 32, "float32"),
    Case((33,), (4, 2), 64, "bfloat16", window=5),
    Case((20, 1, 12), (6, 2), 32, "float16", window=1),
    Case((1,) * 4, (4, 1), 64, "bfloat16"),
    Case((7, 26), (4, 1), 32, "float32", window=20),
)
