"""What every scheme costs the bundled model on text that it was not trained on, and that it still speaks.

Bounds are twice what was measured. Faults that they are to catch are tried as well.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.model.backbone import Packed, packed_logits
from jllm.model.params import with_matrices
from jllm.quant.quantize import quantize
from jllm.quant.schemes import PRESETS
from pallas_kernels.formats.quantized_weights import QuantizedWeight

# The opening of The Wonderful Wizard of Oz (1900), which the model's card names as held out.
TEXT = """\
Dorothy lived in the midst of the great Kansas prairies, with Uncle Henry, who was a farmer, and Aunt Em, who was the \
farmer's wife. Their house was small, for the lumber to build it had to be carried by wagon many miles. There were \
four walls, a floor and a roof, which made one room; and this room contained a rusty looking cookstove, a cupboard \
for the dishes, a table, three or four chairs, and the beds. Uncle Henry and Aunt Em had a big bed in one corner, and \
Dorothy a little bed in another corner. There was no garret at all, and no cellar--except a small hole dug in the \
ground, called a cyclone cellar, where the family could go in case one of those great whirlwinds arose, mighty enough \
to crush any building in its path. It was reached by a trap door in the middle of the floor, from which a ladder led \
down into the small, dark hole. When Dorothy stood in the doorway and looked around, she could see nothing but the \
great gray prairie on every side. Not a tree nor a house broke the broad sweep of flat country that reached to the \
edge of the sky in all directions. The sun had baked the plowed land into a gray mass, with little cracks running \
through it."""

TOKENS, STORY = 128, 32  # of the text that are read, and of a story that is told

# Kullback-Leibler divergence from the float32 model, in nats a token, and how much of the loss it may add.
BOUNDS = {
    "w8a16": 2e-4,
    "uint8-zp": 2e-4,
    "w8a8": 1.2e-3,
    "w8a8-all": 1.2e-3,
    "w8a8-head": 1.2e-3,
    "w8a8-groups": 6e-4,
    "llm-int8": 1.2e-3,
    "fp8-weight": 2.5e-3,
    "fp8": 6e-3,
    "fp8-b128": 6e-3,
    "w4a16-g32-zp": 0.025,
    "w4a16-g64-zp": 0.03,
    "w4a16-g128-zp": 0.035,
    "w4a16-g32": 0.035,
    "w4a16-g64": 0.04,
    "w4a16-g128": 0.045,
    "nf4": 0.03,
    "nf4-dq": 0.03,
    "fp4": 0.05,
    "fp4-dq": 0.05,
    "w8a8-tensor": 0.055,
}


@pytest.fixture(scope="module")
def model():
    return jllm.load()


@pytest.fixture(scope="module")
def tokens(model):
    return np.asarray(model.tokenizer.encode(TEXT)[:TOKENS], np.int32)


def logprobs(model, params, tokens) -> np.ndarray:
    """Not under jit: so one layer is compiled, and serves all eight."""
    ids = jnp.asarray(tokens, jnp.int32)
    batch = Packed(ids, jnp.arange(ids.shape[0], dtype=jnp.int32), jnp.zeros_like(ids))
    return np.asarray(jax.nn.log_softmax(packed_logits(params, model.config, batch)), np.float64)


@pytest.fixture(scope="module")
def plain(model, tokens):
    return logprobs(model, model.params, tokens)


def divergence(plain, other) -> float:
    return float((np.exp(plain) * (plain - other)).sum(axis=1).mean())


def loss(logprobs, tokens) -> float:
    return float(-logprobs[np.arange(len(tokens) - 1), tokens[1:]].mean())


def test_every_preset_has_a_bound():
    assert {*BOUNDS, "bf16"} == set(PRESETS)


@pytest.mark.parametrize("name", BOUNDS)
def test_divergence_and_loss(model, tokens, plain, name):
    got = logprobs(model, quantize(model.params, name), tokens)
    kl = divergence(plain, got)
    assert BOUNDS[name] / 10 < kl < BOUNDS[name]  # nothing at all would mean that nothing was quantized
    # By Pinsker's inequality probabilities move by at most sqrt(kl / 2); what is left of that in the mean loss is less.
    assert abs(loss(got, tokens) - loss(plain, tokens)) < max(5e-3, 2 * BOUNDS[name])


def swap_scales(w: QuantizedWeight) -> QuantizedWeight:
    return replace(w, scales=jnp.roll(w.scales, 1, axis=-1))


def drop_zeros(w: QuantizedWeight) -> QuantizedWeight:
    assert w.zeros is not None
    return replace(w, zeros=jnp.zeros_like(w.zeros))


@pytest.mark.parametrize(("name", "fault"), [("w8a8", swap_scales), ("nf4", swap_scales), ("w4a16-g64-zp", drop_zeros)])
def test_the_bounds_catch_faults(model, tokens, plain, name, fault):
    """Of one kind of weight, in every layer."""
    params = quantize(model.params, name)
    layers = tuple(with_matrices(layer, {"down": fault(layer.mlp.down)}) for layer in params.layers)
    assert divergence(plain, logprobs(model, replace(params, layers=layers), tokens)) > 2 * BOUNDS[name]


def story_loss(model, params) -> float:
    """Nats a token that the float32 model gives to a greedy story of these weights, as long as the text: so nothing is
    compiled for it."""
    prompt = model.tokenizer.encode("The old king had three sons, and")
    whole = np.pad(prompt, (0, TOKENS - len(prompt)))
    stop = len(prompt) + STORY
    for i in range(len(prompt), stop):
        whole[i] = logprobs(model, params, whole)[i - 1].argmax()
    assert len(set(whole[len(prompt) : stop])) > STORY / 4
    scores = logprobs(model, model.params, whole)
    return float(-np.mean([scores[i - 1, whole[i]] for i in range(len(prompt), stop)]))


@pytest.fixture(scope="module")
def own_story_loss(model):
    return story_loss(model, model.params)


@pytest.mark.parametrize("name", ["w8a8", "w4a16-g64", pytest.param("fp8", marks=pytest.mark.exhaustive)])
def test_stories_are_as_likely_as_the_wide_models_own(model, own_story_loss, name):
    """Fluent, as the model itself judges it: a greedy story of the quantized model, scored in float32, loses at most
    0.35 nats a token to the float32 model's own greedy story. Repeated or random tokens lose more than 3."""
    assert story_loss(model, quantize(model.params, name)) < own_story_loss + 0.35
