"""Lists shapes of weight_only_matmul that tests and benchmarks share."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.cases import normal
from pallas_kernels.formats.quantized_weights import QuantizedWeight, encode
from pallas_kernels.formats.weight_formats import parse_weight_format

_encode = jax.jit(encode, static_argnums=1)


@dataclass(frozen=True)
class Case:
    """Describes one call: x [*leading, k] times a weight [n, k] in `format`."""

    leading: tuple[int, ...]
    n: int
    k: int
    format: str
    dtype: str = "bfloat16"
    bias: bool = False
    residual: bool = False
    out_dtype: str | None = None
    shuffled: bool = False  # the weight's columns are stored in another order

    def inputs(self, seed: int = 0) -> tuple[jax.Array, QuantizedWeight, jax.Array | None, jax.Array | None]:
        """Returns x, w, bias and residual: standard normal values, w scaled so that results are too."""
        rng = np.random.default_rng(seed)
        x = normal(rng, (*self.leading, self.k), self.dtype)
        w = _encode(normal(rng, (self.n, self.k), "float32") * self.k**-0.5, parse_weight_format(self.format))
        if self.shuffled:
            w = replace(w, columns=jnp.asarray(rng.permutation(self.k), jnp.int32))
        bias = normal(rng, (self.n,), self.dtype) if self.bias else None
        residual = normal(rng, (*self.leading, self.n), self.dtype) if self.residual else None
        return x, w, bias, residual


# Every format; all kinds of x, of addends and of sizes; K a multiple of 256, which the Mosaic kernel takes.
CASES = (
    Case((1,), 96, 256, "w4a16-g32"),
    Case((2, 3), 128, 512, "w4a16-g64", "float16", bias=True),
    Case((1,), 320, 1024, "w4a16-g128", residual=True),
    Case((8,), 64, 768, "w4a16-g32-zp", "float32", shuffled=True),
    Case((9,), 160, 512, "w4a16-g64-zp", bias=True, residual=True),
    Case((16,), 96, 512, "w4a16-g128-zp", "float16", shuffled=True),
    Case((17,), 256, 1280, "nf4", out_dtype="float32"),
    Case((1,), 288, 512, "nf4-dq", "float16"),
    Case((3,), 64, 256, "fp4-g32"),
    Case((4,), 64, 256, "iq4nl-g32", "float16"),
    Case((64,), 64, 512, "nf4-g128", "float32", bias=True),
    Case((33,), 128, 256, "w8a16"),
    Case((1,), 96, 1024, "w8a8", "float16", residual=True, out_dtype="float32"),
    Case((5,), 64, 256, "w8a16-g32", bias=True),
    Case((65,), 128, 512, "w8a16-g128-zp", "float16"),
    Case((1,), 160, 256, "uint8-zp"),
    Case((12,), 96, 256, "uint8-zp", "float16", bias=True),
    Case((1,), 96, 1024, "fp8-weight"),
    Case((130,), 64, 256, "fp8", "float16"),
    Case((300,), 192, 512, "w4a16-g128"),
)
# What only the other backends take.
ODD_CASES = (
    Case((3,), 33, 50, "w8a16", bias=True),
    Case((1,), 33, 50, "uint8-zp", "float32"),
    Case((2, 2), 40, 96, "w4a16-g32", shuffled=True),
    Case((4,), 7, 64, "fp8-weight", "float32", residual=True),
    Case((), 64, 48 * 2, "w4a16-g8-zp", "float16"),
)

# LLaMA-7B's linears: QKV, attention output, gate and up, down.
BENCH_SHAPES = ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))  # K, N
BENCH_ROWS = (1, 16, 64, 128, 256, 512, 1024, 4096)
BENCH_FORMATS = ("w4a16-g128", "w4a16-g32", "w4a16-g128-zp", "nf4", "w8a16", "fp8-weight")
BENCH_CASES = tuple(Case((m,), n, k, fmt) for fmt in BENCH_FORMATS for k, n in BENCH_SHAPES for m in BENCH_ROWS)
