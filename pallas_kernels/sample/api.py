"""Samples a token for each row of logits by temperature, top-k, top-p and min-p, with Gumbel noise by its keys."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.backends import DETERMINISTIC, Backend, choose
from pallas_kernels.checks import bind_shapes, check_floats, check_int32
from pallas_kernels.one_order import in_tiles
from pallas_kernels.sample import xla
from pallas_kernels.sample.config import check_supported, check_triton
from pallas_kernels.sample.noise import KEYS


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    keys: jax.Array,
    *,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns tokens i32[R] of logits [R, V], and whether all of a row's logits are finite, bool[R].

    Takes temperature, top_p, min_p [R] (floats), top_k i32[R] and keys u32[R, 4]. A row takes the token with the
    largest (logit - the row's largest) / temperature + noise, the lowest id at ties. A temperature of 0 (or less, or
    NaN) adds no noise; one above 1e30 counts as 1e30. noise.py says how Gumbel noise follows from keys and a token's
    id. Equal keys give equal noise, in rows, calls and models.

    - top-k (0: off) keeps the logits that reach the k-th largest.
    - top-p (1: off) keeps the smallest set of the most likely tokens whose probability, renormalized after top-k,
      reaches p.
    - min-p (0: off) keeps tokens that are at least min_p times as likely as the most likely one.

    Ties at a threshold are kept together, and the most likely token always. NaN counts as -inf, which is never drawn.
    Where a whole row is -inf, the token is 0. +inf counts as the largest number. A row's token depends on its own
    numbers alone, and on one backend is the same in any batch. Backends share the noise's bits. Between backends a
    token may differ if the best two scores are within rounding of each other. Whatever a row holds, its token is in [0,
    V).

    Computes in promote_types(logits.dtype, float32). Raises ValueError for shapes or dtypes that don't fit, and
    NotImplementedError for what a named backend doesn't do.
    """
    rows = (temperature, top_k, top_p, min_p, keys)
    names = ("temperature", "top_k", "top_p", "min_p")
    sizes = bind_shapes(
        logits=(logits, "R V"), **{name: (row, "R") for name, row in zip(names, rows)}, keys=(keys, "R K")
    )
    check_floats(logits=logits)
    check_floats(temperature=temperature, top_p=top_p, min_p=min_p)
    check_int32(top_k=top_k)
    if sizes["K"] != KEYS or keys.dtype != jnp.uint32:
        raise ValueError(f"keys is {keys.dtype}{list(keys.shape)}, expected uint32[R, {KEYS}]")
    if sizes["V"] < 1:
        raise ValueError(f"logits have shape {logits.shape}, expected at least one token")
    return choose(BACKENDS, backend, str(logits.dtype), *logits.shape).run(logits, *rows)


def _mosaic(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.sample import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.sample(*args)


def _triton(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.sample import triton  # imports Triton

    return triton.sample(*args)


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported),
    "triton": Backend(_triton, check_triton, unasked_on=("ampere",)),
    "xla": Backend(xla.sample),
    DETERMINISTIC: Backend(partial(in_tiles, xla.sample), for_xla=True),
}
