"""Values inside of a model on a mesh: tapped, edited and observed as on one device, in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from jllm.analysis.activations import tap
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.model.backbone import packed_logits
from jllm.model.hooks import Hooks
from jllm.model.paged import Packed
from jllm.model.taps import LAYER, LINEAR, TOP
from jllm.quant.quantize import quantize
from jllm.speculative.ngram import NGram
from jllm.step.buckets import Bucket
from tests.parallel.meshes import model_of, on_mesh
from tests.tiny import one_size

jax.config.update("jax_enable_x64", True)
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
BATCH = Packed(jnp.asarray(IDS, jnp.int32), jnp.arange(10, dtype=jnp.int32), jnp.zeros(10, jnp.int32))
EDITABLE = [*(f"layers.1.{name}" for name in LAYER if name != "weights"), *TOP]


def bend(value, rows):
    """Another number for each row, and for each place of it."""
    shift = jnp.sin(3 * rows.index + rows.token).astype(value.dtype).reshape(-1, *[1] * (value.ndim - 1))
    each = jnp.cos(jnp.arange(value[0].size, dtype=value.dtype)).reshape(1, *value.shape[1:])
    return 0.8 * value + 0.3 * shift * each


@pytest.mark.parametrize(("devices", "changes"), [(2, {}), (8, {}), (4, {"num_kv_heads": 8})])
def test_every_value_is_that_of_one_device(devices, changes):
    """Of prompts and decodes; with a KV head on one device, or on four."""
    model = model_of(**changes)
    one, many = (tap(m, IDS, ["*", "*.weights"], prompt=7) for m in (model, on_mesh(model, devices)))
    assert list(one) == list(many)
    assert len(one) == len(LAYER) * model.config.num_layers + len(TOP)
    for name, value in one.items():
        np.testing.assert_allclose(many[name], value, rtol=0, atol=1e-10 * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize("first", range(3))
def test_an_edit_of_each_value(first):
    """Edits every third value at once. tests/model/test_hooks.py has each edit alone, on one device."""
    model = model_of()
    edit, found = dict.fromkeys(EDITABLE[first::3], bend), []
    for m in (model, on_mesh(model, 8)):
        found.append(np.asarray(jax.jit(lambda p, m=m: packed_logits(p, m.config, BATCH, edit))(m.params)))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-10 * np.abs(found[0]).max())
    assert not np.allclose(found[0], packed_logits(model.params, model.config, BATCH))


def seen_before(user, slot, index, token, inputs):
    return user.at[slot, token].set(True, mode="drop")


def penalize_seen(logits, rows):
    seen = rows.user.at[rows.slot].get(mode="clip")
    return jnp.where(seen, jnp.where(logits > 0, logits / 1.6, logits * 1.6), logits)


def lower(matrix, x, rows):
    """An addend to a linear layer, of the whole of its inputs, as strong as the request says."""
    return (x @ matrix.T) * rows.own(rows.inputs)[:, None]


def told(model, prompts, params, hooks, **options):
    """Tokens of each request. If the hooks take inputs, each has a number of its own."""
    engine = Engine(model, hooks=hooks, **options)
    numbers = [None] * len(prompts) if hooks is None or hooks.inputs is None else (0.5, -1.0, 2.0)
    for prompt, asked, number in zip(prompts, params, numbers):
        engine.submit(prompt, asked, inputs=number)
    done = {event.id: event.completion.token_ids for event in engine.run() if event.completion}
    return [done[i] for i in sorted(done)]


def test_hooks_of_an_engine():
    """A repetition penalty of one's own over edited values, where the pool is small, and addends to each linear layer
    by request; edits beside drafts."""
    model = model_of()
    edit = {"layers.*.k": bend, "layers.0.gate_up": bend, "logits": lambda x, rows: x * 1.5}
    penalty = {"logits_processor": penalize_seen, "observe": seen_before, "user": np.zeros(97, bool)}
    prompts = [(5, 6, 7) * 6, (9, 8), tuple(range(30, 50))]
    params = [SamplingParams(temperature=t, seed=3, max_new_tokens=12, ignore_eos=True) for t in (0.0, 0.9, 0.7)]
    few = one_size(2, tokens=6) | {"num_pages": 8}
    drafted = {"speculate": NGram(drafts=2, shortest=1), "buckets": (Bucket(2, 6, 2), Bucket(2, 0, 0, 3))}
    layer, rng = model.params.layers[0], np.random.default_rng(0)
    shapes = {name: getattr(layer.attention, name, getattr(layer.mlp, name, None)).shape for name in LINEAR}
    add = {f"layers.*.{name}": Partial(lower, jnp.asarray(0.05 * rng.normal(size=s))) for name, s in shapes.items()}
    every = Hooks(edit=edit, add=add, inputs=jax.ShapeDtypeStruct((), np.float64), **penalty)
    for hooks, options in ((every, few), (Hooks(edit=edit), few | drafted)):
        wanted, found = (told(m, prompts, params, hooks, **options) for m in (model, on_mesh(model, 8)))
        assert found == wanted
        assert wanted != told(model, prompts, params, None, **few)


def test_arrays_of_a_hook_and_quantized_weights():
    """What is tapped is what was edited, before the rounding of who reads it."""
    model = model_of()
    model = replace(model, params=quantize(model.params, "w8a8"), config=replace(model.config, activation_parts=2))
    steer = Partial(lambda v, x, rows: x + v[None], jnp.linspace(-1.0, 1.0, 64))
    plain = replace(model, config=replace(model.config, activation_parts=1))
    one, two = (
        packed_logits(m.params, m.config, BATCH, {"layers.0.middle": steer}) for m in (model, on_mesh(plain, 2))
    )
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-9 * np.abs(one).max())
