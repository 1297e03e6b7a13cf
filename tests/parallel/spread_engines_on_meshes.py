"""Several engines, each on a mesh: tokens are those of one device, wherever a request runs and whatever fails."""

import warnings
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jllm.distributed.disaggregated import Disaggregated
from jllm.distributed.handover import PrefillEngine
from jllm.engine.drafters import find_drafter
from jllm.engine.moved import pack_pages
from jllm.engine.placement import copy_to
from jllm.errors import ConfigError, WeightsError
from jllm.model.hooks import Hooks
from jllm.parallel.mesh import make_mesh
from jllm.quant.quantize import quantize
from jllm.step.buckets import Bucket
from tests.parallel.meshes import model_of, on_mesh
from tests.parallel.spread_replicas import JOBS, SIZES, Failing, Replicas, alone, finish, same

jax.config.update("jax_enable_x64", True)
SEEDED = [(prompt, replace(params, seed=i)) for i, (prompt, params) in enumerate(JOBS)]
FEW = [SEEDED[i] for i in (0, 2, 5)]  # which need one program a mesh


def pair(first: int) -> Mesh:
    return make_mesh(jax.devices()[first : first + 2])


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def wanted(model):
    return alone(model, SEEDED)


@pytest.fixture(scope="module")
def wanted_few(model):
    return alone(model, FEW)


def run(engine, jobs=FEW):
    for prompt, params in jobs:
        engine.submit(prompt, params)
    ends = finish(engine)
    return [ends[key] for key in sorted(ends)]


def test_tokens_are_those_of_one_device_and_each_device_has_its_share_alone(model, wanted):
    engine = Replicas(on_mesh(model, 2), 2, **SIZES)
    assert engine.slots == 6
    engine.compile_ahead([params for _, params in SEEDED])
    same(run(engine, SEEDED), wanted)
    for first, replica in zip((0, 2), engine._all, strict=True):
        device = replica.engine._device
        assert {x.sharding.mesh for x in jax.tree.leaves((device._state, device._params))} == {pair(first)}
        assert replica.engine.metrics()["requests"] > 0
    found = engine.metrics()
    assert (found["replicas"], found["replicas_failed"], found["compile_first_use"]) == (2, 0, 0)
    engine.close()


def test_each_mesh_takes_other_weights(model):
    other = model_of(seed=1)
    engine = Replicas(on_mesh(model, 2), 2, **SIZES)
    with pytest.raises(WeightsError, match=r"embed must be float64\[2,49,64\], .* not float64\[97,64\]"):
        engine.update(other.params)
    assert engine.update(on_mesh(other, 2).params) == 1
    same(run(engine), alone(other, FEW))
    for first, replica in zip((0, 2), engine._all, strict=True):
        assert {x.sharding.mesh for x in jax.tree.leaves(replica.engine._device._params)} == {pair(first)}
    engine.close()


def test_a_copy_goes_from_each_device_to_the_one_with_the_same_share(model):
    source = on_mesh(replace(model, params=quantize(model.params, "w4a16-g32")), 2)
    copy = copy_to(pair(4), source)
    assert copy.config == replace(source.config, mesh=pair(4))
    for old, new in zip(jax.tree.leaves(source.params), jax.tree.leaves(copy.params), strict=True):
        assert new.sharding.spec == old.sharding.spec
        for mine, theirs in zip(old.addressable_shards, new.addressable_shards, strict=True):
            assert theirs.device == jax.devices()[mine.device.id + 4]
            assert theirs.index == mine.index
            np.testing.assert_array_equal(mine.data, theirs.data)
    again = copy_to(pair(0), source)
    assert all(new is old for new, old in zip(*map(jax.tree.leaves, (again.params, source.params)), strict=True))


def test_what_ran_on_a_mesh_that_failed_begins_again_on_another(model, wanted_few):
    """With placements of one's own, of which the first fails."""
    make = partial(Failing, fails={2: 6})
    engine = Replicas(on_mesh(model, 2), [pair(2), pair(0)], make=make, **SIZES)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        same(run(engine), wanted_few)
    said = [str(each.message) for each in told if "begins again elsewhere" in str(each.message)]
    assert len(said) == engine.metrics()["replicas_failed"] == 1
    assert all(str(device) in said[0] for device in pair(2).devices.flat)
    engine.close()


def test_drafters_are_on_each_mesh(model, wanted_few):
    """Such as a quantized copy, which is made once and then is in shares."""
    mesh = on_mesh(model, 2)
    steps = {"buckets": (Bucket(3, 13, 3), Bucket(3, 0, 0, 3))}
    engine = Replicas(mesh, 2, speculate=find_drafter("copy:w8a16", mesh, 2), **(SIZES | steps))
    same(run(engine), wanted_few)
    assert engine.metrics()["draft_segments"] > 0
    for first, replica in zip((0, 2), engine._all, strict=True):
        assert {x.sharding.mesh for x in jax.tree.leaves(replica.engine._device._drafter)} == {pair(first)}
    engine.close()


def test_hooks_have_their_arrays_on_each_mesh(model):
    def add(bias, logits, rows):
        return logits + bias[None]

    hooks = Hooks(logits_processor=jax.tree_util.Partial(add, jnp.linspace(-2.0, 2.0, model.config.vocab_size)))
    engine = Replicas(on_mesh(model, 2), 2, hooks=hooks, **SIZES)
    same(run(engine), alone(model, FEW, hooks=hooks))
    engine.close()


# A mesh for prompts, and one that decodes


@pytest.mark.parametrize(("ranks", "kv_cache"), [(2, None), (4, "k=int8-g16,v=int4-g8")])
def test_prompts_go_from_one_mesh_to_the_other(model, ranks, kv_cache):
    """Four devices keep each of the two KV heads twice."""
    engine = Disaggregated(on_mesh(model, ranks), kv_cache=kv_cache, **SIZES)
    first, second = (replica.engine for replica in engine._all)
    engine.compile_ahead([params for _, params in FEW])
    same(run(engine), alone(model, FEW, kv_cache=kv_cache))
    assert second.metrics()["prefix_forked_tokens"] > 0, "what was computed elsewhere"
    assert engine.metrics()["compile_first_use"] == 0
    for start, one in ((0, first), (ranks, second)):
        mesh = make_mesh(jax.devices()[start : start + ranks])
        wanted = NamedSharding(mesh, P(None, "model"))
        assert all(x.sharding.is_equivalent_to(wanted, x.ndim) for x in jax.tree.leaves(one._device._state.cache))
    engine.close()


def test_each_device_sends_its_heads_alone(model):
    engine = PrefillEngine(on_mesh(model, 2), to=pair(2), **SIZES)
    pages = engine._device.pack([3, 5], 16, pair(2))
    for array in pages.arrays:
        assert array.sharding == NamedSharding(pair(2), P(None, "model"))
    packed = pack_pages(engine._device._state.cache, np.asarray([3, 5], np.int32))
    for here, there in zip(packed, pages.arrays, strict=True):
        assert here.addressable_shards[0].data.shape == there.addressable_shards[0].data.shape
    engine.close()


def test_when_the_mesh_that_decodes_fails_the_other_does_all(model, wanted_few):
    engine = Disaggregated(on_mesh(model, 2), [pair(2), pair(0)], **SIZES)
    second = engine._all[1].engine
    advance, left = second._loop.advance, iter(range(4))

    def advance_or_fail():
        if next(left, None) is None:
            raise RuntimeError("this device is gone")
        advance()

    second._loop.advance = advance_or_fail
    with pytest.warns(RuntimeWarning, match="begins again elsewhere"):
        same(run(engine), wanted_few)
    engine.close()


PAIRS = [([pair(0)], "take two meshes, not 1"), ([pair(0), make_mesh(4)], "takes one of 2 for each")]


@pytest.mark.parametrize(("devices", "why"), PAIRS)
def test_meshes_of_other_sizes_are_no_pair(model, devices, why):
    with pytest.raises(ConfigError, match=why):
        Disaggregated(on_mesh(model, 2), devices, **SIZES)


# Bad input


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        (5, "5 replicas need 10 devices, and there are 8: give 1 to 4"),
        ([pair(0), Mesh(np.asarray(jax.devices()[1:3]), ("model",))], "each but once"),
        ([make_mesh(jax.devices()[:4])], "the model is on a mesh, and takes one of 2 for each replica"),
        (jax.devices()[:2], "the model is on a mesh, and takes one of 2 for each replica"),
        ([Mesh(np.asarray(jax.devices()[:2]), ("data",))], "the mesh has the axes data: expected one, 'model'"),
    ],
)
def test_placements_that_do_not_fit(model, devices, why):
    with pytest.raises(ConfigError, match=why):
        Replicas(on_mesh(model, 2), devices, **SIZES)


def test_a_mesh_for_a_model_on_one_device(model):
    with pytest.raises(ConfigError, match="the model is on one device, and takes a device for each replica"):
        Replicas(model, [pair(0)], **SIZES)
