"""Lists shapes of row_matmul that tests and benchmarks share: the products of low-rank adapters."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

# The linear layers of LLaMA-2-7B: numbers of outputs that are merged, and inputs.
TARGETS = {
    "qkv": ((4096, 4096, 4096), 4096),
    "o": ((4096,), 4096),
    "gate_up": ((11008, 11008), 4096),
    "down": ((4096,), 11008),
}


@dataclass(frozen=True)
class Case:
    """Describes one product of M rows, each with one of several adapters: `shrink` is the one with a, else with b."""

    target: str
    shrink: bool
    rows: int
    rank: int
    adapters: int  # places
    used: int  # adapters that rows take

    @property
    def parts(self) -> tuple[int, ...]:
        """Returns the parts of N."""
        parts = TARGETS[self.target][0]
        return (len(parts) * self.rank,) if self.shrink else parts

    @property
    def x(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, len(self.parts), self.w().shape[3]), jnp.bfloat16)

    def w(self) -> jax.ShapeDtypeStruct:
        k = TARGETS[self.target][1] if self.shrink else self.rank
        return jax.ShapeDtypeStruct((1, self.adapters, sum(self.parts), k), jnp.bfloat16)

    @property
    def out_dtype(self) -> str:
        return "float32" if self.shrink else "bfloat16"

    @property
    def group(self) -> jax.Array:
        """Returns i32[M], the adapter of each row. Rows of one are side by side."""
        return jnp.arange(self.rows, dtype=jnp.int32) * self.used // self.rows

    @property
    def moved_bytes(self) -> int:
        """Returns the bytes of the adapters that are used, of x and of the result."""
        n, k = self.w().shape[2:]
        result = self.rows * n * jnp.dtype(self.out_dtype).itemsize
        return min(self.used, self.rows) * n * k * 2 + self.x.size * self.x.dtype.itemsize + result


def cases(rows: int, rank: int, adapters: int, used: int) -> list[Case]:
    """Returns the products of all linear layers."""
    return [Case(target, shrink, rows, rank, adapters, used) for target in TARGETS for shrink in (True, False)]


# Every row its own adapter, one for all rows of as many places, and a few of a larger rank. Then eight prompts.
FEW_CASES = [*cases(64, 16, 64, 64), *cases(64, 16, 64, 1), *cases(16, 64, 8, 8), *cases(1, 16, 8, 1)]
BENCH_CASES = [*FEW_CASES, *cases(8192, 64, 8, 8)]
