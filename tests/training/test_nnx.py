"""Checks that flax and optax train a model, and orbax keeps it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.model.backbone import packed_logits
from jllm.model.paged import Packed
from tests.tiny import tiny_model

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 90, (2, 9)), jnp.int32)
LENGTHS = jnp.asarray([9, 6], jnp.int32)


def test_a_step_of_nnx_is_that_of_the_pure_functions_and_goes_on_from_a_checkpoint(tmp_path):
    plain = tiny_model(num_layers=1)
    model = jllm.nnx.Llama(plain.params, plain.config)
    assert jllm.nnx.params(nnx.state(model)).embed is plain.params.embed
    row = Packed(TOKENS[0], jnp.arange(9, dtype=jnp.int32), jnp.zeros(9, jnp.int32))
    np.testing.assert_allclose(model(TOKENS)[0], packed_logits(plain.params, plain.config, row), atol=1e-5)

    def loss(model):
        return -model.token_logprobs(TOKENS, LENGTHS).sum()

    def pure(params):
        return -jllm.token_logprobs(params, plain.config, TOKENS, LENGTHS).sum()

    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer):
        value, gradient = nnx.value_and_grad(loss)(model)
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(model, gradient)
        return value, jllm.nnx.params(gradient)

    value, gradient = train(model, optimizer)
    wanted, reference = jax.jit(jax.value_and_grad(pure))(plain.params)
    assert value == wanted
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    checkpoint = pytest.importorskip("orbax.checkpoint")
    leaves, tree = jax.tree.flatten(nnx.state((model, optimizer)))
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "kept", leaves)
        checkpointer.wait_until_finished()
        later = [train(model, optimizer)[0] for _ in range(2)]
        assert later[1] < later[0] < value
        nnx.update((model, optimizer), jax.tree.unflatten(tree, checkpointer.restore(tmp_path / "kept", leaves)))
    assert [train(model, optimizer)[0] for _ in range(2)] == later
