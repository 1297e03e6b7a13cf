"""Checks a deterministic pass for Hopper by its trace: one kernel attends, and XLA adds nothing in an order of its own.

A device shows that the bits are equal (tests/test_gpu_oracle.py).
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jllm.model import sampling
from jllm.model.attention import attention_inputs, paged_attention
from jllm.model.cache import make_cache, parse_kv_cache
from jllm.model.paged import Chunks, ShortSegments, as_chunks, paged_batch
from jllm.model.param_specs import abstract_params
from jllm.programs.packed_step import Layout, packed_step
from jllm.step.buckets import Bucket
from jllm.step.state import State, Variant, make_slots
from pallas_kernels import one_order
from pallas_kernels.backends import TARGET
from tests.kernels_of import KERNEL, equations, kernels_of
from tests.tiny import CONFIG

# Sizes of no other test: JAX keeps what was traced here.
SMALL = replace(
    CONFIG, vocab_size=1072, hidden_size=640, intermediate_size=896, num_layers=1, head_dim=128, qk_norm=True
)
SUMS = {"reduce_sum", "dot_general", "cumsum", "reduce_window_sum"}


def sums(jaxpr) -> list[str]:
    """Returns the sums of floats that are left to XLA, and exponentials that it may join with a sum."""
    found = []
    for each in equations(jaxpr):
        if each.primitive.name in SUMS and jnp.issubdtype(each.outvars[0].aval.dtype, jnp.floating):
            found.append(str(each))
    return found + [str(each) for each in unfenced(jaxpr)]


def unfenced(jaxpr) -> list:
    """Returns exponentials of [R, V] whose readers are no barriers."""
    inner = (each for each in equations(jaxpr) if each.primitive.name != KERNEL)
    levels = [jaxpr, *(level for each in inner for level in jaxprs_in_params(each.params))]
    found = []
    for level in levels:
        for each in level.eqns:
            if each.primitive.name == "exp" and each.outvars[0].aval.ndim == 2:
                readers = [other for other in level.eqns if each.outvars[0] in other.invars]
                found += [each for other in readers if other.primitive.name != "optimization_barrier"]
    return found


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setenv(TARGET, "9.0")


def trace():
    """Returns the trace of a step with decode rows and prompt chunks that gives all log-probabilities."""
    layout = Layout(Bucket(4, 24, 2), deltas=8)
    cache = jax.eval_shape(lambda: make_cache(SMALL, 32, 16, parse_kv_cache("int8-g8", SMALL, jnp.bfloat16)))
    state = State(cache, jax.eval_shape(lambda: make_slots(4, 8)))
    args = abstract_params(SMALL, jnp.bfloat16), state, jax.ShapeDtypeStruct((layout.size,), np.int32)
    variant = Variant(logprobs=True, tempered=True, prompt_logprobs=True)
    return packed_step.trace(*args, config=SMALL, layout=layout, backend="deterministic", variant=variant).jaxpr.jaxpr


def test_kernels_do_all_sums_of_a_step_but_those_of_probabilities(hopper):
    step = trace()
    assert not sums(step)
    kernels = kernels_of(step)
    assert kernels["prefill_attention"] == 1
    assert not kernels["decode_attention"]


def test_seeded_faults_are_caught(hopper, monkeypatch):
    logits, tokens = jax.ShapeDtypeStruct((5, 1072), "float32"), jax.ShapeDtypeStruct((5,), "int32")

    def traced():
        of = partial(sampling.token_logprobs, backend="deterministic")
        return jax.make_jaxpr(lambda *args: of(*args))(logits, tokens).jaxpr

    assert not sums(traced())
    with monkeypatch.context() as fault:
        fault.setattr(one_order, "log_sum_exp", partial(jax.nn.logsumexp, axis=1))
        assert sums(traced())
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda x: x)
    assert sums(traced())


@pytest.mark.parametrize("n", [1, 1071])
def test_the_order_of_a_sum_is_written_down(n):
    x = np.random.default_rng(n).normal(size=(3, n)).astype(np.float32)
    x[2] = -np.inf
    found = jax.jit(one_order.log_sum_exp)(x)
    np.testing.assert_allclose(found[:2], np.log(np.exp(x[:2].astype(np.float64)).sum(axis=1)), rtol=1e-6, atol=1e-6)
    assert found[2] == -np.inf


@pytest.mark.parametrize("width", [1, 3])
def test_short_segments_are_chunks(width):
    """Compares attention of both forms. One segment is not in use, and another only in part."""
    config, page, pages = replace(CONFIG, num_layers=1), 8, 4
    table = np.arange(4 * pages, dtype=np.int32).reshape(4, pages)
    used = np.array([width, 0, 1], np.int32)
    short = ShortSegments(np.zeros((3, width), np.int32), np.array([9, 3, 0], np.int32), used, table[:3])
    chunks = Chunks(np.zeros(7, np.int32), np.array([4], np.int32), np.array([5], np.int32), table[3:])
    batch = paged_batch(*jax.tree.map(jnp.asarray, (short, chunks)), num_pages=16, page_size=page)
    rng = np.random.default_rng(0)
    cache = make_cache(config, 16, page, parse_kv_cache(None, config, jnp.float32)).at_layer(0)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype) if x.ndim > 1 else x, cache)
    q = jnp.asarray(rng.normal(size=(3 * width + 7, config.num_heads, config.head_dim)), jnp.float32)
    angles = jnp.ones((len(q), config.head_dim // 2))
    own = {"config": config, "window": None, "backend": "xla"}
    two = [attention_inputs(each, angles, angles, cache, q.dtype, **own) for each in (batch, as_chunks(batch))]
    want, got = (paged_attention(q, cache, each, scale=0.25, window=None, backend="xla") for each in two)
    np.testing.assert_allclose(got, want, atol=1e-6)
    idle = np.flatnonzero(np.arange(width)[None, :] >= used[:, None])
    assert not np.asarray(got)[idle].any()
    assert not np.asarray(got)[3 * width + 5 :].any()
    assert np.asarray(got)[:width].any()
