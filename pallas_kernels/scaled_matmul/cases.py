"""Lists shapes of int8_matmul and fp8_matmul that tests and benchmarks share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.cases import normal

E4M3 = "float8_e4m3fn"


@dataclass(frozen=True)
class Case:
    """Describes one call: x [m, k] times w [n, k], both of `operand`."""

    m: int
    n: int
    k: int
    operand: str
    bias: bool = False
    residual: bool = False
    out_dtype: str = "bfloat16"
    saturated: bool = False  # codes of the largest magnitude only
    zero_rows: bool = False  # some scales of rows and columns are zero
    in_blocks: bool = False  # every 128 columns of x and of w have scales of their own

    def inputs(self, seed: int = 0) -> tuple[jax.Array | None, ...]:
        """Returns x, w, x_scale, w_scale, bias and residual: zero mean; scales such that results are near one."""
        rng = np.random.default_rng(seed)
        x, w = (self._codes(rng, (rows, self.k)) for rows in (self.m, self.n))
        size = np.sqrt(np.mean(np.square(np.asarray(w).astype(np.float64))))
        groups = (-(-self.k // 128),) if self.in_blocks else ()
        x_scale = rng.uniform(0.5, 1.5, (self.m, *groups)).astype(np.float32) / np.float32(size)
        w_scale = rng.uniform(0.5, 1.5, (*groups, self.n)).astype(np.float32) / np.float32(size * self.k**0.5)
        if self.zero_rows:
            x_scale[::3] = 0
            w_scale[..., 1::4] = 0
        bias = normal(rng, (self.n,), self.out_dtype) if self.bias else None
        residual = normal(rng, (self.m, self.n), self.out_dtype) if self.residual else None
        return x, w, jnp.asarray(x_scale), jnp.asarray(w_scale), bias, residual

    def _codes(self, rng: np.random.Generator, shape: tuple[int, int]) -> jax.Array:
        if self.operand != "int8":
            values = rng.standard_normal(shape) * 100
            if self.saturated:
                values = np.copysign(448.0, values)
            return jnp.asarray(np.clip(values, -448, 448).astype(jnp.dtype(self.operand)))
        low, high = (-128, -127) if self.saturated else (-127, 128)
        return jnp.asarray(rng.integers(low, high, shape, np.int8))


def make_cases(operand: str) -> tuple[Case, ...]:
    """Yields every M, the smallest N and K and odd multiples of 32, all results' dtypes, with and without addends."""
    return (
        Case(1, 96, 96, operand),
        Case(5, 160, 128, operand, bias=True, out_dtype="float16"),
        Case(64, 32, 160, operand, residual=True),
        Case(65, 128, 256, operand, bias=True, residual=True, out_dtype="float32"),
        Case(127, 96, 384, operand, residual=True, out_dtype="float16"),
        Case(128, 160, 32, operand, bias=True),
        Case(200, 224, 512, operand, zero_rows=True, bias=True, residual=True),
        Case(300, 320, 640, operand, out_dtype="float32"),
        Case(16, 64, 11008, operand, saturated=True, out_dtype="float32"),
        Case(136, 64, 11008, operand, saturated=True, out_dtype="float32"),
        Case(1, 1024, 4096, operand, residual=True),
        Case(256, 512, 4096, operand, residual=True),
    )


BLOCKS = (  # of float8 with a scale a block
    Case(1, 96, 256, E4M3, in_blocks=True),
    Case(5, 160, 384, E4M3, bias=True, out_dtype="float16", in_blocks=True),
    Case(64, 416, 1408, E4M3, residual=True, in_blocks=True),
    Case(127, 96, 640, E4M3, residual=True, out_dtype="float16", zero_rows=True, in_blocks=True),
    Case(300, 320, 640, E4M3, bias=True, residual=True, out_dtype="float32", in_blocks=True),
    Case(136, 64, 11008, E4M3, saturated=True, out_dtype="float32", in_blocks=True),
)

# LLaMA-7B's linears: QKV, attention output, gate and up, down.
BENCH_SHAPES = ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))  # K, N
BENCH_ROWS = (1, 16, 64, 128, 256, 512, 1024, 4096)


def make_bench_cases(operand: str) -> tuple[Case, ...]:
    """Yields LLaMA-7B's linears at every M of the bars."""
    return tuple(Case(m, n, k, operand) for k, n in BENCH_SHAPES for m in BENCH_ROWS)
