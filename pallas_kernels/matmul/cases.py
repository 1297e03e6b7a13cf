"""Lists shapes of matmul that tests and benchmarks share."""

from dataclasses import dataclass

import jax
import numpy as np

from pallas_kernels.bench.cases import normal


@dataclass(frozen=True)
class Case:
    """Describes one call: x [*leading, K] times w [N, K]."""

    leading: tuple[int, ...]
    n: int
    k: int
    dtype: str
    bias: bool = False
    residual: bool = False
    out_dtype: str | None = None

    def inputs(self, seed: int = 0) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns x, w and, by name, bias and residual: standard normal values, w scaled so that products are too."""
        rng = np.random.default_rng(seed)
        x = normal(rng, (*self.leading, self.k), self.dtype)
        w = normal(rng, (self.n, self.k), "float32") * self.k**-0.5
        added = {"bias": normal(rng, (self.n,), self.dtype)} if self.bias else {}
        if self.residual:
            added["residual"] = normal(rng, (*self.leading, self.n), self.out_dtype or self.dtype)
        return x, w.astype(self.dtype), added


CASES = (
    Case((1,), 96, 256, "bfloat16"),
    Case((1,), 96, 256, "float32", bias=True),
    Case((5,), 64, 2048, "bfloat16", bias=True, residual=True, out_dtype="float32"),
    Case((2, 3), 64, 128, "float32", residual=True),
    Case((), 64, 128, "bfloat16", bias=True),
    Case((7,), 33, 65, "float16", bias=True),
    Case((7,), 33, 65, "float32", out_dtype="bfloat16"),
    Case((1, 1), 64, 2048, "bfloat16", bias=True, out_dtype="float32"),
    Case((3, 4), 48, 96, "float16", residual=True),
)

# N and K. First LLaMA-7B's linears (QKV, attention output, gate and up, down) and its head, whose logits are float32.
# Then what LLaMA-3-8B has besides (QKV, down, head), and 13B (QKV, output, down). Last half of 7B (output, down; QKV is
# 8B's).
HEADS = (32000, 128256)
BENCH_SHAPES = (
    (12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096),
    (6144, 4096), (4096, 14336), (128256, 4096), (15360, 5120), (5120, 5120), (5120, 13824),
    (4096, 2048), (4096, 5504),
)  # fmt: skip
BENCH_ROWS = (1, 8, 16, 32, 64, 128, 256)


def bench_case(m: int, n: int, k: int) -> Case:
    return Case((m,), n, k, "bfloat16", out_dtype="float32" if n in HEADS else None)


BENCH_CASES = tuple(bench_case(m, n, k) for n, k in BENCH_SHAPES for m in BENCH_ROWS)
