"""On several devices of one host (`pytest -m gpu`): the exchange over their memory has the bits that it should, and an
engine on them gives the tokens that it gives through XLA's exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jllm
from pallas_kernels.all_reduce import MeshAxis, all_reduce, peer
from pallas_kernels.all_reduce.bench import AXIS, check_replays, check_sum

GPUS = jax.devices() if jax.default_backend() == "gpu" else []
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(GPUS) < 2, reason="takes several GPUs")]


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(("rows", "dtype"), [(1, "bfloat16"), (65, "float16"), (1000, "bfloat16"), (7, "float32")])
def test_sums_are_in_the_order_of_ranks_and_rounded_once(rows, dtype, once):
    mesh = Mesh(np.asarray(GPUS), (AXIS,))
    axis = MeshAxis(AXIS, tuple(device.local_hardware_id for device in GPUS))

    def run(x, bias=None, residual=None):
        return peer.all_reduce(x, axis, bias, residual, once=once)

    found = check_sum(run, mesh, rows, 4096, jnp.dtype(dtype))
    assert found["alike"]
    assert found["bits"]
    assert check_replays(run, mesh, rows, 512, jnp.dtype(dtype), 60)


def test_what_is_not_a_number_stays_so():
    """A word of all ones, which means that nothing has arrived, is sent as another one that is no number."""
    mesh = Mesh(np.asarray(GPUS[:2]), (AXIS,))
    axis = MeshAxis(AXIS, tuple(device.local_hardware_id for device in GPUS[:2]))
    bits = np.zeros((2, 4, 64), np.uint32)
    bits[0, 1], bits[1, 2, 5] = 0xFFFFFFFF, 0x7FC00000
    x = jax.device_put(bits.view(np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS)))
    own = lambda x: all_reduce(x[0], axis, backend="peer")[None]  # noqa: E731
    spec = jax.sharding.PartitionSpec(AXIS)
    found = np.asarray(jax.jit(jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(x))
    wanted = np.zeros((4, 64), bool)
    wanted[1], wanted[2, 5] = True, True
    for rank in found:
        np.testing.assert_array_equal(np.isnan(rank), wanted)


def test_an_engine_on_two_devices_tells_the_story_of_one():
    greedy = jllm.SamplingParams(temperature=0.0, max_new_tokens=48)
    found = []
    for mesh in (None, 2):
        model = jllm.load(dtype="float32", mesh=mesh)
        found.append(jllm.generate(model, "Once upon a time", greedy, max_slots=1, executables=None)[0].token_ids)
    assert found[0] == found[1]
