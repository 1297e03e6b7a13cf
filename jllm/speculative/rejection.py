"""Rejection sampling: a draft is accepted with probability min(1, p / q), where the target draws it with probability p
and the drafter drew it with q (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

Each token then has the target's distribution, and a draft is accepted with probability 1 - TV, TV the total variation
distance of p and q; drafts that must equal the target's draw (accept.py) are accepted with at least
(1 - TV) / (1 + TV). But tokens depend on the drafter, and on which steps have room for drafts: with other drafts, or
beside other requests, a seed gives other tokens. Without a temperature they are those of plain decoding.

It takes noise of three purposes, independent of each other: the drafter's, that of accepting, and the target's.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jllm.errors import ConfigError
from jllm.sampling import Purpose, Sampling, noise, scores
from jllm.speculative.drafter import Drafter

ACCEPTANCES = ("equal", "rejection")  # how drafts are accepted: as accept.py says, the default, and as this file does


def check_acceptance(drafter: Drafter, acceptance: str) -> None:
    """ConfigError unless drafts of this drafter can be accepted so."""
    if acceptance not in ACCEPTANCES:
        raise ConfigError(f"acceptance must be one of {', '.join(ACCEPTANCES)}, not {acceptance!r}")
    if acceptance == "rejection" and not drafter.tree.is_chain:
        nodes = drafter.tree.size
        raise ConfigError(
            f"acceptance='rejection' takes chains of drafts, and this drafter makes a tree of {nodes} nodes"
        )


def accept_or_draw(
    logits: jax.Array,
    sampling: Sampling,
    index: jax.Array,
    drafts: jax.Array,
    proposed: jax.Array,
    *,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The token of each row i32[rows]: its draft if that is accepted, else one drawn from the rest; and whether the
    row's logits are finite. Plain jnp, whatever the backend.

    logits [rows, V] are the target's and proposed [rows, V] those that the drafter drew from, before temperature and
    filters; index i32[rows] is the token's, drafts i32[rows] are -1 where there is none: then the token is the one
    that sampling.sample draws. The rest is max(p - q, 0).
    """
    target, there = scores(logits, sampling), drafts >= 0
    p, q = jax.nn.log_softmax(target, axis=1), jax.nn.log_softmax(scores(proposed, sampling), axis=1)
    drafted = jnp.maximum(drafts, 0)
    ratio = jnp.take_along_axis(q, drafted[:, None], axis=1) - jnp.take_along_axis(p, drafted[:, None], axis=1)
    # u < p / q, with -log(u) exponential
    exponential = jnp.exp(-noise(replace(sampling, purpose=Purpose.ACCEPTING), index, 1, p.dtype))
    accepted = there & (exponential >= ratio)[:, 0]
    excess = p > q
    share = jnp.log(-jnp.expm1(jnp.where(excess, q - p, -1)))  # of (p - q) / p
    rest = jnp.where(excess, target + share, -jnp.inf)
    # Without a draft all is left; rounding may leave nothing.
    rest = jnp.where((there & excess.any(axis=1))[:, None], rest, target)
    drawn = jnp.argmax(rest + noise(sampling, index, logits.shape[1], rest.dtype), axis=1).astype(jnp.int32)
    return jnp.where(accepted, drafts, drawn), jnp.isfinite(logits).all(axis=1)


def certain(tokens: jax.Array, vocabulary: int, dtype: jnp.dtype) -> jax.Array:
    """Logits [..., V] of drafts i32[...] that were not drawn: each had to be what it is."""
    return jnp.where(jax.nn.one_hot(tokens, vocabulary, dtype=bool), 0, -jnp.inf).astype(dtype)
