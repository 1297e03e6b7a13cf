"""Defines a request that changes engines while it runs, as a value: its samples so far, and K and V of its prompt.

Between engines whose pages are alike, pages are copied from device to device. Between meshes of one size, each device
sends to the device that has the same heads. Otherwise a snapshot goes by way of the host, to pages of any size. Few
tokens are generated so far: the receiving engine computes their K and V itself, with the next token. So nothing is
drawn twice, and the tokens are those that one engine would have given.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from jllm.engine.request import SamplingParams, TokenLogprob
from jllm.files.snapshot import Snapshot, gather_pages, scatter_pages
from jllm.model.backbone import Cache


class Begun(NamedTuple):
    """Holds an unfinished sample as far as it has come. Times are on the clock of the process that has it."""

    sample: int
    output: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    versions: tuple[int, ...]
    scores: dict[int, Any]  # of prompt tokens: see Sequence.prompt_scores
    submitted: float
    first_token: float | None
    last_token: float


@dataclass(frozen=True)
class DevicePages:
    """K and V of the first `length` tokens of a sequence, in pages that are on their way to a device: what takes the
    place of a Snapshot between engines whose pages are alike. Arrays are a cache's, of these pages alone."""

    length: int
    arrays: tuple[jax.Array, ...]

    @property
    def ready(self) -> bool:
        """Returns whether they have arrived."""
        return all(array.is_ready() for array in self.arrays)  # type: ignore[attr-defined]


class Handover(NamedTuple):
    """Holds a request that an engine has let go. `kv` is K and V of the prompt's tokens; None: of no token."""

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    samples: tuple[Begun, ...]
    started: int  # samples that it ever had
    guided: int  # where the text of its guide begins
    version: int  # of the weights that computed kv
    kv: Snapshot | DevicePages | None


@jax.jit
def pack_pages(cache: Cache, page: jax.Array) -> tuple[jax.Array, ...]:
    """Returns these pages of all layers, i32[n]."""
    return tuple(jax.tree.leaves(gather_pages(cache, page)))


@partial(jax.jit, donate_argnums=0)
def unpack_pages(cache: Cache, page: jax.Array, arrays: tuple[jax.Array, ...]) -> Cache:
    """Returns the cache with what pack_pages took at other pages, i32[n]; a page outside of the cache is dropped."""
    return scatter_pages(cache, page, jax.tree.unflatten(jax.tree.structure(cache), arrays))
