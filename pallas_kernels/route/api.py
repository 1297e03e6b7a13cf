"""Routes tokens to experts."""

from collections.abc import Callable

import jax

from pallas_kernels.backends import Backend, choose, where_faster
from pallas_kernels.checks import bind_shapes
from pallas_kernels.route import xla
from pallas_kernels.route.config import check_supported
from pallas_kernels.route.xla import Here, Sorted


def route(
    scores: jax.Array,
    x: jax.Array,
    *,
    chosen: int,
    normalize: bool,
    here: Here | None = None,
    seen: Callable[[jax.Array], jax.Array] = lambda routes: routes,
    block: int = 64,
    apart: bool = False,
    backend: str | None = None,
) -> Sorted:
    """Returns rows of x [T, E] sorted by the experts that compute them, and each token's shares of these.

    The `chosen` experts with a token's best scores [T, X] compute it, those of the lowest numbers at ties. Shares are
    softmax over all scores, in float32 at least. If normalized, those of a token add up to 1. seen: gets the experts'
    numbers i32[T, chosen], the best first, and returns those that count. It may so return others, and some of them
    twice. A number that no expert has computes nothing. Of experts `here` alone there are rows in groups. A schedule
    of the ragged products is made where that costs no launch. Its blocks have `block` rows, a power of two. If they are
    apart, each begins with an expert's rows. Scores and x have gradients. XLA does what the kernels don't, also if they
    are named. Raises ValueError where shapes disagree.
    """
    experts = bind_shapes(scores=(scores, "T X"), x=(x, "T E"))["X"]
    if not 1 <= chosen <= experts:
        raise ValueError(f"{chosen} of {experts} experts are chosen, expected 1 to {experts}")
    here = here or Here(experts)
    run = choose(BACKENDS, where_faster(backend), scores, x, chosen, here.experts == experts).run
    return run(scores, x, chosen, normalize, here, seen, block, backend, apart=apart)


def _mosaic(*arguments, **how) -> Sorted:
    from pallas_kernels.route import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.sort_tokens(*arguments, **how)


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported),
    "xla": Backend(xla.sort_tokens),
}
