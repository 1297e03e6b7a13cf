"""Lists shapes of norm_quant that tests and benchmarks share."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallas_kernels.bench.cases import normal

EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """Describes one call: T rows of E values."""

    rows: int
    width: int
    dtype: str
    kind: str | None
    residual: bool = True

    def inputs(self, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns x, weight and residual: standard normal values; row t is smaller by 2^-(t mod 6)."""
        rng = np.random.default_rng(seed)
        shape = (self.rows, self.width)
        sizes = np.exp2(-(np.arange(self.rows) % 6)).astype(self.dtype)[:, None]
        x, residual = (normal(rng, shape, self.dtype) * sizes for _ in range(2))
        return x, normal(rng, shape[1:], self.dtype), residual if self.residual else None

    @property
    def labels(self) -> dict[str, Any]:
        """Names the case in a table."""
        return {"T": self.rows, "E": self.width, "kind": self.kind or "none", "residual": self.residual}

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of the call, the residual left out."""
        return {"eps": EPS, "kind": self.kind}

    @property
    def moved_bytes(self) -> int:
        """Counts what must move: x and the residual in; their sum, the rows and their scales out; the weight."""
        size = np.dtype(self.dtype).itemsize
        row = self.width * (size if self.kind is None else 1) + (0 if self.kind is None else 4)
        return self.rows * (row + self.width * size * (3 if self.residual else 1)) + self.width * size


KINDS = (None, "int8", "fp8")
CASES = tuple(
    Case(rows, width, dtype, kind, residual)
    for width, rows, dtype, residual in (
        (128, 3, "bfloat16", True),
        (384, 1, "float16", False),
        (1408, 5, "float16", True),
        (2048, 3, "bfloat16", False),
        (2560, 2, "float32", True),
        (2880, 2, "bfloat16", True),
        (5120, 2, "bfloat16", True),
    )
    for kind in KINDS
)
BENCH_CASES = tuple(
    Case(rows, width, "bfloat16", kind, residual)
    for rows in (1, 16, 64, 128, 256, 512, 2048, 8192)
    for width, residual in ((4096, True), (4096, False), (8192, True))
    for kind in KINDS
)
