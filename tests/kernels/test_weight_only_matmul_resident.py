"""The kernel for few rows of x that stay in shared memory: what its threads do, with numpy in place of PTX, on bytes as
TMA writes them; under the interpreter with race detection; lowered for CUDA; and on a device."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import SHARED_MEMORY
from pallas_kernels.quantized_weights import decode, group_scales, parse_weight_format
from pallas_kernels.smem_sm90 import shared_bytes
from pallas_kernels.weight_only_matmul import mosaic_sm90, reference, resident_sm90
from pallas_kernels.weight_only_matmul.cases import Case
from pallas_kernels.weight_only_matmul.config import Config, candidates
from pallas_kernels.weight_only_matmul.operand_sm90 import pair_table
from pallas_kernels.weight_only_matmul.plan_sm90 import Plan
from pallas_kernels.weight_only_matmul.stream_sm90 import add_parts
from tests.kernels.helpers import same_bits
from tests.kernels.test_weight_only_matmul_mosaic import (
    FORMATS,
    TOLERANCE,
    check_company,
    check_interpreted,
    every_code,
    lower,
    row_error,
    shapes,
    swizzled_bytes,
)
from tests.kernels.test_weight_only_matmul_stream import StreamEmulator, raw

RESIDENT = Config(fold=4, warpgroups=4, stages=12, resident=True)
SMALL = replace(RESIDENT, warpgroups=2, stages=3, ctas=2)


class ResidentEmulator(StreamEmulator):
    """Of one CTA."""

    def load_words(self, name, offset, more):
        self.conflicts = max(self.conflicts, self._wavefronts(self._places(name, offset, more, 16)[:, 0]))
        return self.fetch(name, offset, more, 4)

    conflicts = 0

    def _wavefronts(self, places) -> int:
        """How often the busiest bank is asked for different words by 8 lanes that load 16 bytes each."""
        most = 0
        for eight in places.reshape(-1, 8):
            seen = np.unique(eight // 16)
            most = max(most, np.bincount(seen % 8).max())
        return most

    def load_stored(self, name, offset, more):
        return self.load_vector(name, offset, more)

    def less(self, a, b):
        return a < b

    def exclusive_or(self, a, b):
        return a ^ b

    def divided(self, a, b):
        return a // np.uint32(b), a % np.uint32(b)


def staged(array: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
    """What a copy brings: zeros past the end."""
    found = array[rows, columns]
    shape = rows.stop - rows.start, columns.stop - columns.start
    return np.pad(found, [(0, want - have) for want, have in zip(shape, found.shape)])


def emulated(case: Case, config: Config):
    """The kernel's result by numpy, tile by tile and stage by stage, the expected one, and the worst wavefronts of a
    load."""
    x, w, _, _ = case.inputs()
    (n, k), m, fmt = w.shape, case.leading[0], w.format
    plan = Plan(m, n, k, x.dtype, jnp.dtype(case.out_dtype or case.dtype), fmt, config, False)
    sizes, threads = resident_sm90.Sizes(plan), 128 * config.warpgroups
    values, scales = np.asarray(w.values).view(np.uint8), np.asarray(group_scales(w))
    zeros = None if w.zeros is None else np.asarray(w.zeros)
    out, conflicts = np.zeros(config.split * m * n * plan.out_dtype.itemsize, np.uint8), 0
    for part, tile in np.ndindex(config.split, sizes.tiles):
        memory = {"x": raw(x), "x_s": np.zeros(sizes.of_part * m * 256, np.uint8)}
        number = np.full(threads, part, np.uint32)
        resident_sm90.prepare_x(plan, ResidentEmulator(x.dtype, memory, threads, 1), number)
        memory = {"x": memory["x_s"]}
        if fmt.codes == "nf4":
            memory["table"] = raw(pair_table(x.dtype))
        rows = slice(16 * tile, 16 * tile + 16)
        total = [np.zeros(threads, np.float32)] * (config.tokens // 2)
        chunks = np.uint32(min(sizes.of_part, sizes.chunks - part * sizes.of_part))
        for step in range(sizes.steps):
            chunk = part * sizes.of_part + step * sizes.warps
            first = chunk * 128 // sizes.width
            stage = staged(values, rows, slice(first, first + sizes.row_bytes))
            memory["w"] = swizzled_bytes(stage, sizes.row_bytes // 128, 128)
            for name, vector in (("scales", scales), ("zeros", zeros)):
                if vector is not None and plan.by_group:
                    group = chunk * 128 // fmt.group
                    memory[name] = raw(staged(vector, slice(group, group + sizes.groups), rows))
                elif name == "zeros" and vector is not None:
                    memory[name] = raw(vector)
            emulator = ResidentEmulator(x.dtype, memory, threads, 1)
            thread = resident_sm90.Resident(plan, emulator, np.full(threads, tile, np.uint32))
            total = thread.stage(total, np.full(threads, step * sizes.warps, np.uint32), chunks)
            conflicts = max(conflicts, emulator.conflicts)
        parts = np.zeros((sizes.warps, 16, config.tokens), np.float32)
        lane = np.arange(32)
        for (t, half, i), values_of in zip(np.ndindex(config.tokens // 8, 2, 2), total):
            parts[:, lane // 4 + 8 * half, 8 * t + lane % 4 * 2 + i] = values_of.reshape(sizes.warps, 32)
        vectors = {} if plan.by_group else {"scales": raw(scales)}
        last = ResidentEmulator(x.dtype, {"parts": raw(parts), "out": out, **vectors}, 128, 1)
        last.advance("out", np.full(128, part, np.uint32), m * n * plan.out_dtype.itemsize)
        add_parts(plan, last, np.full(128, tile, np.uint32), partial(resident_sm90.row_of, last))
    found = out.view(plan.out_dtype).reshape(config.split, m, n).astype(np.float32).sum(0)
    return found, reference.weight_only_matmul(x, w, None, None), conflicts


EMULATED = [
    (Case((1,), 32, 1024, "w4a16-g128"), SMALL),
    (Case((3,), 32, 2560, "w4a16-g128-zp"), RESIDENT),
    (Case((8,), 32, 1280, "w4a16-g64", "float16"), SMALL),
    (Case((1,), 32, 2816, "w4a16-g32-zp", "float16", out_dtype="float32"), replace(SMALL, split=3)),
    (Case((5,), 32, 1024, "nf4"), SMALL),
    (Case((16,), 32, 1280, "nf4"), replace(RESIDENT, tokens=16)),
    (Case((13,), 32, 2304, "w4a16-g128", out_dtype="float32"), replace(SMALL, tokens=16, split=2)),
    (Case((1,), 32, 1280, "nf4-g128", "float16"), SMALL),
    (Case((2,), 32, 640, "w8a16"), SMALL),
    (Case((9,), 32, 512, "uint8-zp"), replace(SMALL, tokens=16)),
    (Case((1,), 32, 640, "uint8-zp", "float16"), SMALL),
    (Case((2,), 32, 512, "w8a16-g32-zp"), RESIDENT),
    (Case((7,), 32, 1024, "w8a16-g64"), SMALL),
    (Case((1,), 32, 1152, "w8a16-g128-zp", "float16", out_dtype="float32"), replace(SMALL, split=2)),
    (Case((4,), 32, 512, "fp8-weight"), SMALL),
    (Case((1,), 32, 640, "fp8-weight", "float16"), RESIDENT),
]


@pytest.mark.parametrize(("case", "config"), EMULATED, ids=str)
def test_every_thread_does_its_part(case, config):
    out, expected, conflicts = emulated(case, config)
    assert row_error(out, expected) < TOLERANCE[case.dtype]
    assert conflicts == 1


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("packed_pairs", lambda real: lambda self, words: real(self, words[::-1])),
        ("load_some_x", lambda real: lambda self, chunk: real(self, chunk ^ 1)),
        ("load_vectors", lambda real: lambda self, chunk: real(self, chunk)[::-1]),
        ("load_codes", lambda real: lambda self, chunk: real(self, chunk)[::-1]),
    ],
)
def test_seeded_faults_are_caught(monkeypatch, method, fault):
    monkeypatch.setattr(resident_sm90.Resident, method, fault(getattr(resident_sm90.Resident, method)))
    out, expected, _ = emulated(Case((1,), 32, 1024, "w4a16-g128"), SMALL)
    assert row_error(out, expected) > 0.1


INTERPRETED = [
    (Case((1,), 128, 2048, "w4a16-g128", residual=True), SMALL),
    (Case((3,), 64, 1280, "w4a16-g32-zp", "float16"), replace(SMALL, split=2)),
    (Case((8,), 64, 1024, "nf4", out_dtype="float32"), SMALL),
    (Case((5,), 96, 640, "w8a16-g64"), SMALL),
    (Case((1,), 64, 512, "uint8-zp", bias=True), SMALL),
    (Case((11,), 64, 1152, "w8a16"), replace(SMALL, tokens=16, ctas=1)),
    (Case((2,), 32, 2048, "fp8-weight"), RESIDENT),
]


@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_interpreted(case, config):
    check_interpreted(case, config)


def test_parts_are_added_in_their_order():
    check_company(Case((8,), 64, 1280, "w4a16-g128"), SMALL)


@pytest.mark.parametrize("name", FORMATS)
def test_lowers_for_cuda(name):
    some = ("bfloat16", RESIDENT, 4096), ("float16", replace(SMALL, tokens=16, split=2), 1280)
    for dtype, config, k in some:
        x, w = shapes(Case((3,), 64, k, name, dtype))
        run = partial(mosaic_sm90.weight_only_matmul, bias=None, residual=None, out_dtype=x.dtype, config=config)
        assert "mosaic_gpu" in lower(lambda x, w, run=run: run(x, w), x, w)


def test_configurations_are_checked():
    for name, value in (("tokens", 24), ("fold", 2), ("warpgroups", 3), ("width", 64), ("stream", True)):
        with pytest.raises(ValueError, match=f"{name} is {value}, expected .* where x is resident"):
            replace(RESIDENT, **{name: value})
    for m, k, config, message in (
        (9, 512, RESIDENT, "takes at most 8 rows of x, not M=9"),
        (16, 11008, replace(RESIDENT, tokens=16), "more shared memory .* a larger split needs less"),
        (1, 512, replace(RESIDENT, split=3), "K=512 has fewer parts"),
    ):
        x, w = shapes(Case((m,), 64, k, "w4a16-g128"))
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(partial(mosaic_sm90.product, out_dtype=x.dtype, config=config), x, w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_gpu_every_code_in_every_place(name, dtype):
    """x picks one column at a time: the product is the decoded weight itself, rounded to x's dtype."""
    w = every_code(name)
    x = jnp.eye(256, dtype=dtype)
    expected = np.asarray(decode(w, dtype)).astype(np.float64).T
    for config, rows in ((RESIDENT, 8), (replace(SMALL, ctas=1), 7), (replace(RESIDENT, tokens=16), 13), (RESIDENT, 1)):
        for first in range(0, 256 if rows > 1 else 32, rows):
            some = x[first : first + rows]
            out = mosaic_sm90.weight_only_matmul(some, w, None, None, jnp.dtype("float32"), config=config)
            assert (np.asarray(out).astype(np.float64) == expected[first : first + rows]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 11008), (22016, 4096)])
@pytest.mark.parametrize("name", ["w4a16-g128", "w4a16-g32-zp", "nf4", "w8a16", "fp8-weight"])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_gpu_at_the_size_of_a_layer(name, n, k, rows):
    """Many stages and tiles a CTA: a stage overwritten too early shows here."""
    x, w, _, _ = Case((rows,), n, k, name).inputs()
    expected = reference.weight_only_matmul(x, w, None, None)
    for config in candidates(rows, n, k, parse_weight_format(name)):
        if config.resident:
            run = partial(
                mosaic_sm90.weight_only_matmul, w=w, bias=None, residual=None, out_dtype=x.dtype, config=config
            )
            out = run(x)
            assert row_error(out, expected) < TOLERANCE["bfloat16"]
            assert all(same_bits(run(x), out) for _ in range(3))
            assert same_bits(run(x[rows - 1 :]), out[rows - 1 :])


def test_the_ring_is_deep():
    """4.4 TB/s want some 40 KB in flight on each multiprocessor."""
    for name in ("w4a16-g128", "nf4", "w8a16", "uint8-zp", "w4a16-g32-zp"):
        fmt = parse_weight_format(name)
        names = "x", "w", "scales", *(["zeros"] if fmt.zero_point else []), *(["table"] if fmt.codes == "nf4" else [])
        for m in (1, 8, 16):
            for n, k in ((4096, 4096), (4096, 11008), (22016, 4096), (12288, 4096)):
                for config in candidates(m, n, k, fmt):
                    if config.resident:
                        plan = Plan(m, n, k, jnp.dtype("bfloat16"), jnp.dtype("float32"), fmt, config, False)
                        scratch = resident_sm90.scratch(plan, names)
                        assert shared_bytes(scratch) <= SHARED_MEMORY
                        stages, rows, width = scratch["w_s"].shape
                        assert (stages - 1) * rows * width >= 40 * 1024
