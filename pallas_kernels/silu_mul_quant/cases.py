"""Lists shapes of silu_mul_quant that tests and benchmarks share."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallas_kernels.bench.cases import normal


@dataclass(frozen=True)
class Case:
    """Describes one call: T rows of F gates and F factors."""

    rows: int
    width: int
    dtype: str
    kind: str | None

    def inputs(self, seed: int = 0) -> jax.Array:
        """Returns gate_up: normal values; row t is larger by 2^(t mod 4), so that sigmoids saturate too."""
        rng = np.random.default_rng(seed)
        sizes = np.exp2(np.arange(self.rows) % 4).astype(self.dtype)[:, None]
        return normal(rng, (self.rows, 2 * self.width), self.dtype) * sizes

    @property
    def labels(self) -> dict[str, Any]:
        """Names the case in a table."""
        return {"T": self.rows, "F": self.width, "kind": self.kind or "none"}

    @property
    def moved_bytes(self) -> int:
        """Counts what must move: gate and up in; the rows and their scales out."""
        size = np.dtype(self.dtype).itemsize
        row = self.width * (size if self.kind is None else 1) + (0 if self.kind is None else 4)
        return self.rows * (row + 2 * self.width * size)


KINDS = (None, "int8", "fp8")
CASES = tuple(
    Case(rows, width, dtype, kind)
    for width, rows, dtype in (
        (128, 3, "bfloat16"),
        (384, 1, "float16"),
        (1408, 5, "float16"),
        (2048, 2, "float32"),
        (2880, 2, "bfloat16"),
        (11008, 2, "bfloat16"),
    )
    for kind in KINDS
)
BENCH_CASES = tuple(
    Case(rows, width, "bfloat16", kind)
    for rows in (1, 16, 64, 128, 256, 512, 2048, 8192)
    for width in (11008, 28672)
    for kind in KINDS
)
