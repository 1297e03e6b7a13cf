"""The kernel for few rows of x: what its threads do, with numpy in place of PTX; under the interpreter with race
detection, where the format's definition stands in for that; lowered for CUDA; and on a device."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_weights import decode, group_scales
from pallas_kernels.weight_only_matmul import mosaic_sm90, reference, stream_sm90
from pallas_kernels.weight_only_matmul.cases import Case
from pallas_kernels.weight_only_matmul.config import Config
from pallas_kernels.weight_only_matmul.operand_sm90 import pair_table
from pallas_kernels.weight_only_matmul.plan_sm90 import Plan
from tests.kernels.helpers import same_bits
from tests.kernels.test_weight_only_matmul_mosaic import (
    FORMATS,
    TOLERANCE,
    Emulator,
    check_company,
    check_interpreted,
    every_code,
    lower,
    row_error,
    shapes,
)

STREAM = Config(fold=4, warpgroups=1, stream=True)


class StreamEmulator(Emulator):
    """What emitter_sm90.StreamEmitter emits, for the threads of all CTAs at once."""

    def __init__(self, dtype, memory: dict[str, np.ndarray], threads: int, ctas: int) -> None:
        super().__init__(dtype, memory, threads)
        self.cta = np.repeat(np.arange(ctas, dtype=np.uint32), threads)
        self.threads = np.tile(self.threads, ctas)
        self.begin = {name: np.zeros(len(self.threads), np.int64) for name in memory}
        self.seen = np.ones(len(self.threads), bool)

    def masked_xor(self, a, mask, b):
        return (a & np.uint32(mask)) ^ np.uint32(b)

    def _places(self, name, offset, more, size):
        places = self.begin[name] + offset.astype(np.int64) + more
        return np.where(self.seen, places, 0)[:, None] + np.arange(size)  # others touch nothing

    def load(self, name, offset, kind, more=0):
        dtype = np.dtype({32: np.uint32, "f32": np.float32}[kind])
        return self.memory[name][self._places(name, offset, more, dtype.itemsize)].view(dtype)[:, 0]

    def advance(self, name, index, size):
        self.begin[name] = self.begin[name] + index.astype(np.int64) * size

    def minimum(self, a, b):
        return np.minimum(a, np.uint32(b))

    def below(self, a, b):
        return a < b

    def stream(self, name, offset, more):
        return self.fetch(name, offset, more, 4)

    def fetch(self, name, offset, more, words):
        places = self._places(name, offset, more, 4 * words)
        assert (places[:, 0] % (4 * words) == 0).all()
        return list(np.ascontiguousarray(self.memory[name][places].view(np.uint32).T))

    def load_vector(self, name, offset, more):
        dtype = np.dtype(np.int8 if name == "zeros" else np.float16)
        values = self.memory[name][self._places(name, offset, more, dtype.itemsize)].view(dtype)[:, 0]
        return values.astype(np.int32).view(np.uint32) if name == "zeros" else values

    def widened(self, scale):
        return scale.astype(np.float32)

    def zero(self):
        return np.zeros(len(self.threads), np.float32)

    def plus(self, a, b):
        return a + b

    def scaled(self, a, b):
        return a * b

    def fused(self, a, b, c):
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def multiply_add(self, left, right, sums):
        """By the layouts of mma.m16n8k16 in the PTX manual."""
        lane = np.arange(32)
        above, pair = lane // 4, lane % 4 * 2
        a, b = np.zeros((len(self.threads) // 32, 16, 16)), np.zeros((len(self.threads) // 32, 16, 8))
        for i, bits in enumerate(left):
            values = self.floats(bits).reshape(-1, 32, 2)
            for j in range(2):
                a[:, above + i % 2 * 8, pair + i // 2 * 8 + j] = values[:, :, j]
        for i, bits in enumerate(right):
            values = self.floats(bits).reshape(-1, 32, 2)
            for j in range(2):
                b[:, pair + i * 8 + j, above] = values[:, :, j]
        products = a @ b
        return [
            (sums[i].reshape(-1, 32) + products[:, above + i // 2 * 8, pair + i % 2]).astype(np.float32).reshape(-1)
            for i in range(4)
        ]

    def either(self, condition, values, others):
        seen, self.seen = self.seen, self.seen & condition
        found = [np.where(condition, a, b) for a, b in zip(values(), others)]
        self.seen = seen
        return found

    def only(self, condition, do):
        seen, self.seen = self.seen, self.seen & condition
        do()
        self.seen = seen

    def store(self, name, offset, more, words):
        places = self._places(name, offset, more, 16)
        self.memory[name][places[self.seen]] = np.stack(words, 1).view(np.uint8)[self.seen]

    def store_float(self, name, offset, x, dtype):
        places, bits = self._places(name, offset, 0, dtype.itemsize), x.astype(dtype)[:, None].view(np.uint8)
        self.memory[name][places[self.seen]] = bits[self.seen]

    def synchronize(self):
        pass


def raw(array) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


def emulated(case: Case, config: Config):
    """The kernel's result by numpy: every thread of every CTA, and the sum of their parts."""
    x, w, _, _ = case.inputs()
    (n, k), m = w.shape, case.leading[0]
    plan = Plan(m, n, k, x.dtype, jnp.dtype(case.out_dtype or case.dtype), w.format, config, False)
    memory = {"x": raw(x), "w": raw(w.values), "scales": raw(group_scales(w))}
    if w.zeros is not None:
        memory["zeros"] = raw(w.zeros)
    ctas, threads = n // config.rows, 128 * config.warpgroups
    if w.format.codes == "nf4":
        memory |= {"bytes": raw(pair_table(x.dtype)[:, 0]), "table": np.zeros(256 * 128, np.uint8)}
    emulator = StreamEmulator(x.dtype, memory, threads, ctas)
    sums = stream_sm90.Stream(plan, emulator, emulator.cta).sums()
    parts = np.zeros((ctas, config.warpgroups, config.row_tiles, 4, 16, config.tokens), np.float32)
    lane = np.arange(32)
    for (r, t, half, i), values in zip(np.ndindex(config.row_tiles, config.tokens // 8, 2, 2), sums):
        row, token = lane // 4 + 8 * half, 8 * t + lane % 4 * 2 + i
        parts[:, :, r][:, :, :, row, token] = values.reshape(ctas, config.warpgroups, 4, 32)
    vectors = {"scales": memory["scales"]} if w.format.group is None else {}
    out = np.zeros(m * n * plan.out_dtype.itemsize, np.uint8)
    last = StreamEmulator(x.dtype, {"parts": raw(parts), "out": out, **vectors}, 128, ctas)
    last.advance("parts", last.cta, parts[0].nbytes)
    stream_sm90.add_parts(plan, last, last.cta)
    return out.view(plan.out_dtype).reshape(m, n), reference.weight_only_matmul(x, w, None, None)


EMULATED = [
    (Case((1,), 96, 1024, "w4a16-g128"), STREAM),
    (Case((3,), 64, 1408, "w4a16-g128-zp"), replace(STREAM, warpgroups=2)),
    (Case((8,), 64, 1280, "w4a16-g64", "float16"), replace(STREAM, stages=2)),
    (Case((1,), 64, 768, "w4a16-g32-zp", "float16", out_dtype="float32"), replace(STREAM, fold=2)),
    (Case((5,), 64, 512, "nf4"), STREAM),
    (Case((13,), 64, 1280, "w4a16-g128"), replace(STREAM, tokens=16, row_tiles=2)),
    (Case((16,), 64, 512, "nf4"), replace(STREAM, tokens=16, row_tiles=2, fold=2)),
    (Case((9,), 64, 512, "uint8-zp"), replace(STREAM, tokens=16, row_tiles=2, warpgroups=2)),
    (Case((2,), 64, 512, "w8a16-g32-zp"), replace(STREAM, row_tiles=4)),
    (Case((1,), 32, 1280, "nf4-g128", "float16"), replace(STREAM, warpgroups=2)),
    (Case((2,), 64, 640, "w8a16"), STREAM),
    (Case((1,), 64, 512, "w8a16-g128-zp", "float16"), STREAM),
    (Case((7,), 32, 1024, "w8a16-g64"), STREAM),
    (Case((1,), 32, 640, "w8a16-g32-zp"), replace(STREAM, warpgroups=2)),
    (Case((8,), 64, 512, "uint8-zp"), replace(STREAM, fold=2, warpgroups=2)),
    (Case((1,), 64, 640, "uint8-zp", "float16"), STREAM),
    (Case((4,), 64, 512, "fp8-weight"), STREAM),
    (Case((1,), 64, 512, "fp8-weight", "float16"), replace(STREAM, stages=2)),
]


@pytest.mark.parametrize(("case", "config"), EMULATED, ids=str)
def test_every_thread_does_its_part(case, config):
    out, expected = emulated(case, config)
    assert row_error(out, expected) < TOLERANCE[case.dtype]


def test_parts_are_added_in_their_order():
    check_company(Case((8,), 32, 1280, "w4a16-g128"), replace(STREAM, warpgroups=2))


INTERPRETED = [
    (Case((1,), 96, 1024, "w4a16-g128", residual=True), STREAM),
    (Case((3,), 64, 1280, "w4a16-g32-zp", "float16"), replace(STREAM, warpgroups=2)),
    (Case((8,), 64, 512, "nf4", out_dtype="float32"), replace(STREAM, fold=2)),
    (Case((5,), 64, 640, "w8a16-g64"), replace(STREAM, warpgroups=3)),
    (Case((1,), 32, 512, "uint8-zp", bias=True), STREAM),
    (Case((11,), 64, 512, "w8a16"), replace(STREAM, tokens=16, row_tiles=2, warpgroups=2)),
    (Case((2,), 32, 512, "fp8-weight"), STREAM),
]


@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_interpreted(case, config):
    check_interpreted(case, config)


@pytest.mark.parametrize("name", FORMATS)
def test_lowers_for_cuda(name):
    wide = replace(STREAM, tokens=16, row_tiles=2)
    some = ("bfloat16", STREAM, 1280), ("float16", replace(STREAM, warpgroups=2, fold=2), 1024), ("float16", wide, 512)
    for dtype, config, k in some:
        x, w = shapes(Case((3,), 64, k, name, dtype))
        run = partial(mosaic_sm90.weight_only_matmul, bias=None, residual=None, out_dtype=x.dtype, config=config)
        text = lower(lambda x, w, run=run: run(x, w), x, w)
        assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("packed_pairs", lambda real: lambda self, words: real(self, words[::-1])),
        ("load_x", lambda real: lambda self, chunk: real(self, chunk ^ 1)),
        ("load_vectors", lambda real: lambda self, chunk: real(self, chunk)[::-1]),
        ("load_codes", lambda real: lambda self, chunk: real(self, max(chunk - 1, 0))),
    ],
)
def test_seeded_faults_are_caught(monkeypatch, method, fault):
    monkeypatch.setattr(stream_sm90.Stream, method, fault(getattr(stream_sm90.Stream, method)))
    out, expected = emulated(Case((1,), 32, 1024, "w4a16-g128"), STREAM)
    assert row_error(out, expected) > 0.1


def test_configurations_are_checked():
    with pytest.raises(ValueError, match="tokens is 24, but a streaming kernel has 8 or 16"):
        Config(tokens=24, stream=True)
    with pytest.raises(ValueError, match="split is 2, but a streaming kernel has 1"):
        Config(split=2, stream=True)
    for m, fold, message in (
        (9, 4, "streams for at most 8 rows of x, not M=9"),
        (1, 1, "64 rows of the weight, which are 96"),
    ):
        x, w = shapes(Case((m,), 96, 512, "w4a16-g128"))
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(partial(mosaic_sm90.product, out_dtype=x.dtype, config=replace(STREAM, fold=fold)), x, w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_gpu_every_code_in_every_place(name, dtype):
    """x picks one column at a time: the product is the decoded weight itself, rounded to x's dtype."""
    w = every_code(name)
    x = jnp.eye(256, dtype=dtype)
    expected = np.asarray(decode(w, dtype)).astype(np.float64).T
    wide = replace(STREAM, tokens=16, row_tiles=2)
    for config, rows in ((STREAM, 8), (replace(STREAM, warpgroups=2, fold=2), 7), (wide, 13), (STREAM, 1)):
        for first in range(0, 256 if rows > 1 else 32, rows):
            some = x[first : first + rows]
            out = mosaic_sm90.weight_only_matmul(some, w, None, None, jnp.dtype("float32"), config=config)
            assert (np.asarray(out).astype(np.float64) == expected[first : first + rows]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 11008)])
@pytest.mark.parametrize("name", ["w4a16-g128", "w4a16-g32-zp", "nf4", "w8a16", "fp8-weight"])
def test_gpu_at_the_size_of_a_layer(name, n, k):
    x, w, _, _ = Case((8,), n, k, name).inputs()
    expected = reference.weight_only_matmul(x, w, None, None)
    for config in (STREAM, replace(STREAM, warpgroups=2)):
        run = partial(mosaic_sm90.weight_only_matmul, w=w, bias=None, residual=None, out_dtype=x.dtype, config=config)
        out = run(x)
        assert row_error(out, expected) < TOLERANCE["bfloat16"]
        assert same_bits(run(x), out)
        assert same_bits(run(x[5:6]), out[5:6])
