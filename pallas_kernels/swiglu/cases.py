"""Lists shapes of swiglu that tests and benchmarks share."""

from dataclasses import dataclass

import jax
import numpy as np

from pallas_kernels.bench.cases import normal


@dataclass(frozen=True)
class Case:
    """Describes one call: x [*leading, K] and w [2F, K]."""

    leading: tuple[int, ...]
    width: int  # F
    k: int
    dtype: str

    def inputs(self, seed: int = 0) -> tuple[jax.Array, jax.Array]:
        """Returns x, w: normal values; products are about 2, so that sigmoids are neither all a half nor all
        saturated."""
        rng = np.random.default_rng(seed)
        w = normal(rng, (2 * self.width, self.k), "float32") * (2 * self.k**-0.5)
        return normal(rng, (*self.leading, self.k), self.dtype), w.astype(self.dtype)


CASES = (
    Case((1,), 48, 256, "bfloat16"),
    Case((2, 3), 80, 160, "float16"),
    Case((70,), 32, 128, "bfloat16"),
    Case((), 16, 64, "bfloat16"),
    Case((3,), 33, 65, "float32"),
)

# MLPs of LLaMA 7B and 13B and of LLaMA-3 8B, and half of 7B's: F, K.
BENCH_SHAPES = ((11008, 4096), (13824, 5120), (14336, 4096), (5504, 4096))
BENCH_ROWS = (1, 8, 16, 32, 64, 128, 256)
BENCH_CASES = tuple(Case((m,), f, k, "bfloat16") for f, k in BENCH_SHAPES for m in BENCH_ROWS)
