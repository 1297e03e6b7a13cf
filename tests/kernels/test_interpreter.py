"""Checks the tests' interpreter: what a GPU would not forgive fails, whichever thread comes first."""

import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GpuClockBundle, Warpgroup
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.smem_sm90 import swizzled
from tests.kernels.evaluate import evaluate
from tests.kernels.helpers import same_bits
from tests.kernels.inlined.memory import swizzled_order
from tests.kernels.interpreter import FIND_RACES, Accesses, Barrier


def test_who_wakes_up_late_learns_nothing_of_the_next_phase():
    threads = [Warpgroup(0, 0, 0, i) for i in range(2)]
    clocks = {thread: GpuClockBundle(2) for thread in threads}
    memory = SimpleNamespace(
        detect_races=True, lock=threading.Lock(), clocks=clocks, pipelineable_async_tasks={t: set() for t in threads},
        check_failed=lambda: None, get_clock=lambda thread: clocks[thread].copy(),
    )  # fmt: skip
    barrier = Barrier(memory, num_pallas_threads_per_block=2, ref_count=1, num_arrivals=1, orders_tensor_core=False)
    for phase in range(2):  # both before the second thread looks
        clocks[threads[0]].inc(0)
        barrier.arrive(threads[0], clocks[threads[0]].copy())
        barrier.wait(threads[0])
        barrier.last_observed_phase_by_thread[threads[1]] = phase
        barrier.wait(threads[1])
        assert clocks[threads[1]].generic_clock.clock.tolist() == [phase + 1, 0]
    assert [known.generic_clock.clock[0] for known in barrier.known] == [1, 2]


def test_accesses_race_where_they_overlap_and_none_knows_of_the_other():
    accesses = Accesses(2)
    for i in range(40):
        accesses.add(np.array([0, i, i, 0, i + 1, 8]), f"row {i}")
    late = np.array([1, 1, 10, 4, 13, 5])
    assert accesses.racing(late, np.array([11, 1])) == ["row 12"]  # it knows of those up to 11
    assert accesses.racing(late, np.array([12, 1])) == []
    assert accesses.racing(np.array([1, 1, 10, 8, 13, 9]), np.array([0, 1])) == []


@pytest.mark.parametrize("dtype", ["int32", "uint32", "float32", "bfloat16"])
def test_threads_are_evaluated_to_the_bits_that_xla_computes(dtype):
    """Tries numbers of both signs, sums that wrap around, loops, branches, and slices past an end."""

    def program(x, y, i):
        z = lax.select(x < y, x + y * x, lax.max(x, y) - lax.min(x, -y))
        if jnp.issubdtype(dtype, jnp.integer):
            z = lax.rem(z, y) + lax.div(x, y) + lax.clamp(jnp.asarray(1, dtype), x, y) + jnp.sum(x, dtype=dtype)
        z = lax.fori_loop(0, 3, lambda _, z: lax.cond(i > 1, lambda: z + y, lambda: z * y), z)
        z, rows = lax.scan(lambda z, row: (z + row, z.astype("float32")), z, jnp.stack([x, y]), reverse=True)
        picked = lax.dynamic_slice(jnp.broadcast_to(z[:, None], (*z.shape, 2)), (i, i), (5, 1))
        return z, rows, picked, lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"), jnp.max(z), z == x

    rng = np.random.default_rng(0)
    x, y = (rng.integers(-(2**31), 2**31, 8).astype("int32") for _ in range(2))
    x, y = (each.view(dtype) if "int" in dtype else (each / 2**28).astype(dtype) for each in (x, y))
    for i in (-3, 0, 7):
        given = jnp.asarray(x), jnp.asarray(y), jnp.int32(i)
        closed = jax.make_jaxpr(program)(*given)
        assert same_bits(evaluate(closed.jaxpr, closed.consts, *given), list(program(*given)))


def product(body, threads: int = 1, **scratch):
    """Returns a kernel around `body`, with operands of wgmma in shared memory: its result [64, 64]."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(64, 64)), jnp.bfloat16) for _ in range(2))

    def kernel(a_ref, b_ref, out, a_s, b_s, out_s, full, **scratch):
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            plgpu.copy_gmem_to_smem(a_ref, a_s, full)
            plgpu.copy_gmem_to_smem(b_ref, b_s, full)
            plgpu.barrier_wait(full)

        result = body(a_ref, a_s, b_s, **scratch)
        if result is None:
            return
        out_s[...] = result
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out)
        plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types={
            "a_s": swizzled((64, 64), jnp.bfloat16), "b_s": swizzled((64, 64), jnp.bfloat16),
            "out_s": plgpu.SMEM((64, 64), jnp.float32), "full": plgpu.Barrier(num_arrivals=2), **scratch,
        },
        num_threads=threads,
        thread_name="warpgroup",
        interpret=FIND_RACES,
    )  # fmt: skip
    out = np.asarray(jax.block_until_ready(run(a, b)))
    return out, np.asarray(a, np.float64) @ np.asarray(b, np.float64)


def accumulator(use):
    return pl.run_scoped(use, plgpu.ACC((64, 64), jnp.float32))


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_product_that_is_not_awaited_is_nan(in_flight):
    def body(a_ref, a_s, b_s):
        def use(acc):
            plgpu.wgmma(acc, a_s, b_s)
            early = plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)
            plgpu.wgmma_wait(0)
            return early

        return accumulator(use)

    out, expected = product(body)
    if in_flight:
        assert np.isnan(out).all()
    else:
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_what_registers_hold_is_multiplied_and_added_to():
    def body(a_ref, a_s, b_s):
        def use(acc):
            acc[...] = jnp.ones((64, 64), jnp.float32)
            plgpu.wgmma(acc, plgpu.load(a_s, layout=plgpu.Layout.WGMMA), b_s)
            return acc[...]

        return accumulator(use)

    out, expected = product(body)
    np.testing.assert_allclose(out, expected + 1, rtol=1e-5, atol=1e-5)


def overwrite(after_wait: bool, fenced: bool):
    """Copies, or stores by the warpgroup itself, into an operand of a product."""

    def body(a_ref, a_s, b_s, again):
        def use(acc):
            plgpu.wgmma(acc, a_s, b_s)
            if after_wait:
                plgpu.wgmma_wait(0)
            if fenced:
                plgpu.copy_gmem_to_smem(a_ref, a_s, again)
                plgpu.barrier_wait(again)
            else:
                a_s[...] = plgpu.layout_cast(jnp.ones((64, 64), jnp.bfloat16), plgpu.Layout.WGMMA)
                plgpu.wgmma(acc, a_s, b_s)
            return acc[...]

        return accumulator(use)

    return product(body, again=plgpu.Barrier())


@pytest.mark.parametrize(("after_wait", "fenced"), [(False, True), (True, False)])
def test_operands_are_read_until_the_product_is_awaited_and_stores_to_them_need_a_fence(after_wait, fenced):
    with pytest.raises(jax.errors.JaxRuntimeError, match="a race in"):
        overwrite(after_wait, fenced)


def test_an_operand_may_be_copied_anew_once_the_product_is_awaited():
    out, expected = overwrite(after_wait=True, fenced=True)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_leaves_a_product_behind_fails():
    def body(a_ref, a_s, b_s):
        accumulator(lambda acc: plgpu.wgmma(acc, a_s, b_s))

    with pytest.raises(jax.errors.JaxRuntimeError, match="without waiting for its products"):
        product(body)


@pytest.mark.parametrize("row", [32, 64, 128, 256])
def test_swizzled_memory_is_as_tma_writes_it(row):
    """Compares by address: each 16 bytes' number is xored with that of the 128 bytes that they are in."""
    width = next(w for w in (128, 64, 32) if row % w == 0)
    order = swizzled_order((16, row), 1, width)
    line, column = np.divmod(order, row)
    tile = (line // 8 * (row // width) + column // width) * 8 * width
    address = tile + line % 8 * width + column % width
    assert np.array_equal(address ^ (address >> 7 & (width // 16 - 1)) << 4, np.arange(order.size))
