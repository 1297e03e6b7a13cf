"""Checks gradients, Adam and GRPO against transformers, torch and trl (tests/data/make_trainers.py)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.files.find import WEIGHTS
from jllm.files.safetensors_io import read_as_stored, read_header
from tests.data.sketch import sketch
from tests.parity import PARITY

optax = pytest.importorskip("optax")
from experiments.grpo import Objective, Rollouts, advantages_of, loss_of, train  # noqa: E402

THEIRS = np.load(PARITY.parent / "trainers.npz")
LR = 1e-4
LONGEST = 8  # tokens of a sample


@pytest.fixture
def sketched(tmp_path):
    """Sketches weights, or their gradients, as files have them."""

    def of(params, config):
        jllm.save(tmp_path, params, config)
        return sketch({name: read_as_stored(each) for name, each in read_header(tmp_path / WEIGHTS).items()})

    return of


def check(got, want, tolerance):
    """Checks sketches [tensors, SIGNS], each against its tensor's size."""
    assert got.shape == want.shape
    assert (np.abs(got - want) <= tolerance * np.linalg.norm(want, axis=1, keepdims=True)).all()


@pytest.mark.parametrize("family", ["llama3.2", "olmoe"])
def test_gradients_are_those_of_autograd(family, sketched):
    with jax.enable_x64(True):
        model = jllm.load(PARITY / family, dtype="float64")
        given = (jnp.asarray(THEIRS[f"{name}/{family}"]) for name in ("tokens", "lengths", "weights"))
        tokens, lengths, weights = given
        score = partial(jllm.token_logprobs, config=model.config, temperature=0.75, entropy=True)

        @jax.jit
        @jax.grad
        def gradient(params):
            found, entropies = score(params, tokens=tokens, lengths=lengths)
            return ((found + entropies / 2) * weights).sum()

        found = gradient(model.params)
        check(sketched(found, model.config), THEIRS[f"gradient/{family}"], 1e-9)
        check(sketched(found, model.config), THEIRS[f"unpatched/{family}"], 1e-5)
        adam = optax.adam(LR)
        with jax.numpy_dtype_promotion("standard"):
            changes, _ = adam.update(found, adam.init(model.params), model.params)
        changed = sketched(optax.apply_updates(model.params, changes), model.config)
        np.testing.assert_allclose(changed, THEIRS[f"adam/{family}"], atol=1e-9, rtol=0)


@pytest.fixture(scope="module")
def policy():
    with jax.enable_x64(True):
        return jllm.load(PARITY / "llama3.2", dtype="float64")


@pytest.mark.parametrize(
    ("objective", "mask_cut"),
    [
        (Objective("grpo", 0.2, 0.2, LR, LONGEST), True),
        (Objective("dr_grpo", 0.05, 0.1, LR, LONGEST), False),
        (Objective("dapo", 0.2, 0.28, LR, LONGEST), True),
    ],
    ids=lambda x: getattr(x, "loss", None),
)
def test_two_steps_of_grpo_on_the_same_samples_are_those_of_trl(objective, mask_cut, policy, sketched):
    """Clipping needs the second. torch divides by the gradient's norm + 1e-6 where it clips that."""
    config, ends, prompts = policy.config, THEIRS["ends"], THEIRS["prompts"]
    tokens, place = jnp.asarray(THEIRS["samples"], jnp.int32), np.arange(13)[None] - prompts[:, None] + 1
    mask = (place >= 0) & (place < ends[:, None]) & ~(mask_cut & (ends == LONGEST))[:, None]
    with jax.enable_x64(True):
        lengths, advantages = jnp.asarray(prompts + ends), advantages_of(THEIRS["rewards"], 4, objective.loss)
        drawn = jllm.token_logprobs(policy.params, config, tokens, lengths)
        numbers = drawn, jnp.asarray(mask, float), mask.astype(np.int32), THEIRS["rewards"], advantages
        batch = Rollouts(tokens, lengths, *numbers)
        params, state = policy.params, objective.optimizer.init(policy.params)
        for step in range(2):
            theirs = {name: THEIRS[f"{objective.loss}/{step}/{name}"] for name in ("loss", "policy", "mu", "nu")}
            params, state, logprobs = train(params, state, batch, config=config, objective=objective, options=())
            assert loss_of(logprobs, batch, objective) == pytest.approx(float(theirs["loss"]), rel=1e-8, abs=1e-10)
            for name in ("mu", "nu"):
                check(sketched(optax.tree_utils.tree_get(state, name), config), theirs[name], 1e-6)
            np.testing.assert_allclose(sketched(params, config), theirs["policy"], atol=1e-8, rtol=0)
    ratio, high = np.exp(np.subtract(logprobs, drawn)), advantages[:, None] > 0
    clipped = np.where(high, ratio > 1 + objective.high, ratio < 1 - objective.low)[mask].mean()
    assert clipped == pytest.approx(float(THEIRS[f"{objective.loss}/clipped"]), abs=1e-6)
