"""Lists rows of sample that tests and benchmarks share."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sample.noise import KEYS

ASKED = {  # what the benchmarked rows ask for
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}
MIXED = (  # every filter alone and with others, between greedy rows
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.0},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    {"temperature": 3.0, "top_k": 7, "top_p": 0.95, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1e-30, "top_p": 0.3},
    {"temperature": 1.0, "top_k": 10**6, "top_p": 0.0},
)


@dataclass(frozen=True)
class Case:
    """Describes one call: R rows of V logits."""

    rows: int
    vocabulary: int
    asked: str

    @property
    def dtype(self) -> str:
        return "float32"

    @property
    def labels(self) -> dict[str, Any]:
        """Names the case in a table."""
        return {"R": self.rows, "V": self.vocabulary, "asked": self.asked}

    @property
    def moved_bytes(self) -> int:
        """Counts what must move: the logits in, once."""
        return 4 * self.rows * self.vocabulary


BENCH_CASES = tuple(
    Case(rows, vocabulary, asked) for rows in (1, 64, 512) for vocabulary in (32000, 128256) for asked in ASKED
)


def arguments(asked: list[dict[str, float]], seed: int = 0) -> tuple[jax.Array, ...]:
    """Returns temperature, top_k, top_p, min_p and keys of rows that ask for this."""
    defaults: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = [np.asarray([(defaults | row)[name] for row in asked]) for name in defaults]
    dtypes = (np.float32, np.int32, np.float32, np.float32)
    keys = np.random.default_rng(seed).integers(0, 1 << 32, (len(asked), KEYS), np.uint32)
    return *(jnp.asarray(column.astype(dtype)) for column, dtype in zip(columns, dtypes)), jnp.asarray(keys)
