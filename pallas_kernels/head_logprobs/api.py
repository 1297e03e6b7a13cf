"""Computes log-probabilities of tokens and entropies over tiles of the vocabulary; for training."""

import jax

from pallas_kernels.backends import Backend, choose
from pallas_kernels.checks import bind_shapes, check_floats, check_int32
from pallas_kernels.head_logprobs import xla


def head_logprobs(
    x: jax.Array,
    w: jax.Array,
    tokens: jax.Array,
    temperature: jax.Array,
    *,
    softcap: float | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns log p(tokens) [T] and the entropy of p [T], for p = softmax(z / temperature), where z is
    x w^T, or with a softcap softcap * tanh(x w^T / softcap).

    Takes x [T, E], w [V, E], tokens i32[T] and temperature [T], above 0. Computes in promote_types(x.dtype, float32).
    It is differentiable by x and w. Neither direction makes an array [T, V]: both go over tiles of the vocabulary from
    the first to the last. A token outside of [0, V) has -inf. Raises ValueError where shapes or dtypes disagree.
    """
    bind_shapes(x=(x, "T E"), w=(w, "V E"), tokens=(tokens, "T"), temperature=(temperature, "T"))
    check_floats(x=x, w=w)
    check_floats(temperature=temperature)
    check_int32(tokens=tokens)
    return choose(BACKENDS, backend).run(x, w, tokens, temperature, softcap)


BACKENDS = {"xla": Backend(xla.head_logprobs)}
