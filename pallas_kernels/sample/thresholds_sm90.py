"""Reads what a row asks for in sample's kernels on Hopper, and finds the threshold that its top-k and top-p set.
Bisection over the float's integer image finds it, of a row that is held or read again. Or it searches what the row's
parts have kept, where that is proven to be enough."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.sample import cut_sm90
from pallas_kernels.sample.block_sm90 import Area, Block, Probe, image, last, number
from pallas_kernels.sample.config import HOTTEST
from pallas_kernels.sample.noise import KEYS
from pallas_kernels.sample.row_sm90 import INFINITY, Held, Streamed

LOG2_E = float(np.log2(np.e))
TINY = float(np.finfo(np.float32).tiny)


class Asked:
    """Holds what row r asks for, read from the arguments' memory."""

    def __init__(self, r: Any, vocabulary: int, temperature: Any, top_k: Any, top_p: Any, min_p: Any, keys: Any):
        self.temperature, self.top_k, self.top_p = temperature[r], top_k[r], top_p[r]
        self.min_p = jnp.minimum(min_p[r], 1.0)
        self.keys = [keys[r, i] for i in range(KEYS)]
        self.sampled = self.temperature > 0.0
        self.limited = jnp.logical_and(self.top_k > 0, self.top_k < vocabulary)
        self.nucleus = self.top_p < 1.0
        self.cut = jnp.logical_or(self.limited, self.nucleus)
        self.filtered = jnp.logical_and(self.sampled, jnp.logical_or(self.cut, self.min_p > 0.0))
        self.bounded = jnp.minimum(jnp.maximum(self.temperature, TINY), HOTTEST)
        self.scale = LOG2_E / self.bounded


def counted(block: Block, sums: Any, asked: Asked) -> Probe:
    """Returns a probe of thresholds: whether at least as many logits as top-k asks for reach each."""
    k = asked.top_k.astype(jnp.float32)

    def probe(at: Any, area: Any) -> tuple[list[Any], list[Any]]:
        counts = block.sums(sums.counts([number(i) for i in at]), area)
        return [count >= k for count in counts], [count == k for count in counts]

    return probe


def weighed(block: Block, sums: Any, target: jax.Array) -> Probe:
    """Returns a probe of thresholds: whether the logits that reach each have at least the weight `target`."""

    def probe(at: Any, area: Any) -> tuple[list[Any], None]:
        return [found >= target for found in block.sums(sums.masses([number(i) for i in at]), area)], None

    return probe


def threshold(block: Block, source: tuple[Any, ...], top: jax.Array, asked: Asked) -> jax.Array:
    """Returns a number that exactly those logits reach that reach both thresholds, of top-k and top-p."""
    sums = Streamed(*source) if len(source) == 2 else Held(*source)
    off, high = jnp.float32(-INFINITY), image(top) + 1

    def by_count() -> jax.Array:
        return number(last(counted(block, sums, asked), image(off), high, sums.pivots))

    lowest = lax.cond(asked.limited, by_count, lambda: off)

    def by_mass() -> jax.Array:
        sums.prepare()
        (mass,) = block.sums(sums.masses([lowest]), Area.MASS)
        probe = weighed(block, sums, jnp.maximum(asked.top_p * mass, TINY))
        return number(last(probe, image(lowest), high, sums.pivots))

    return lax.cond(asked.nucleus, by_mass, lambda: lowest)


def proven_threshold(
    block: Block, sums: cut_sm90.Kept, mass: jax.Array, dropped: jax.Array, top: jax.Array, asked: Asked
) -> tuple[jax.Array, jax.Array]:
    """Returns the threshold among what a row's parts have kept, and whether it is that of the row. Takes the row's mass
    and the largest logit that was dropped. A search begins above what was dropped. Where the sum there falls short of
    what is asked, the row's threshold may be lower, and nothing is proven."""
    off, high = jnp.float32(-INFINITY), image(top) + 1
    all_kept = dropped == off
    first = jnp.where(all_kept, image(off), image(dropped) + 1)
    nothing = off, jnp.bool_(False)

    def searched(probe: Probe, low: jax.Array) -> tuple[jax.Array, jax.Array]:
        reaches = jnp.logical_or(all_kept, probe([low], Area.PROOF)[0][0])
        return lax.cond(
            reaches, lambda: (number(last(probe, low, high, sums.pivots)), jnp.bool_(True)), lambda: nothing
        )

    lowest, proven = lax.cond(
        asked.limited, lambda: searched(counted(block, sums, asked), first), lambda: (off, jnp.bool_(True))
    )

    def by_mass() -> tuple[jax.Array, jax.Array]:
        sums.prepare()
        low = jnp.maximum(first, image(lowest))
        kept_mass = lax.cond(asked.limited, lambda: block.sums(sums.masses([lowest]), Area.MASS)[0], lambda: mass)
        return searched(weighed(block, sums, jnp.maximum(asked.top_p * kept_mass, TINY)), low)

    return lax.cond(jnp.logical_and(proven, asked.nucleus), by_mass, lambda: (lowest, proven))
