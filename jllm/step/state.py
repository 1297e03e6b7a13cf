"""Defines the state of a step, its outputs, and Variant, which selects the optional outputs."""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.model.backbone import Cache, Taps
from jllm.model.cache import KVCache, Tails, make_cache, make_tails, parse_kv_cache
from jllm.model.sampling import Draws, Sampling, TokenCounts, neutral_sampling
from jllm.parallel.ranks import HEADS, REPLICATED, STACKED, place
from jllm.speculative.drafter import Drafter, Drafts
from jllm.speculative.quantized_copy import QuantizedCopy

TOP_LOGPROBS = 20
WANTS = (
    "penalties",
    "logprobs",
    "tempered",
    "prompt_logprobs",
    "guided",
    "adapters",
)  # the fields of a variant that single requests ask for
NOT_FINITE = -2  # replaces a token if the row's logits hold NaN or infinity; the slot is done


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Holds the device's record of each batch slot.

    Here are three slots of at most four pages of 16 tokens. Slot 0 decodes, slot 1 has ended and slot 2 is empty:

        token   [5, 2, 0]
        length  [17, 6, 0]
        done    [False, True, True]
        pages   [[7, 3, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]

    The next step of slot 0 takes token 5 and writes its K and V at cache index 17: page 3, offset 1. If it draws token
    8, then token[0] is 8 and length[0] is 18.
    """

    token: jax.Array  # i32[S] last sampled token: the next input
    length: jax.Array  # i32[S] tokens whose K and V are in the pages
    done: jax.Array  # bool[S] ended: writes nothing and samples nothing
    pages: jax.Array  # i32[S, M] page table
    sampling: Sampling  # [S]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Guidance:
    """Holds the tokens that guides allow each slot in the current step. Q is the number of nodes of the drafter's tree,
    or 1."""

    allowed: jax.Array  # u32[S, Q, ceil(V / 32)], the tokens that may be drawn at each node as bits
    coming: jax.Array  # i32[S, F], the tokens probably drawn from this step on, padded with -1: see forced.py


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Holds everything that the model remembers between steps.

    `user` is a pytree of the caller [S, ...], which hooks read and observe. `inputs` is one that they only read. Here
    is a model of two layers with K = 2 KV heads of D = 64, after init_state(config, slots=3, num_pages=8, page_size=16,
    max_pages=4) in bf16:

        cache   one KVPages; its k and v have values bf16[16, 2, 16, 64], the 8 pages of layer 0, then those of layer 1
        slots   token i32[3], length i32[3], done bool[3], pages i32[3, 4]

    The other fields are None. A step returns a state of the same shapes.
    """

    cache: Cache
    slots: Slots
    counts: TokenCounts | None = None  # [S, V], only while a request has penalties
    guidance: Guidance | None = None  # only while a request has a guide
    drafts: Drafts | None = None  # only with a drafter
    user: Any = None
    inputs: Any = None  # the requests' own arrays
    tails: Tails | None = None  # of the slots, only if K is stored as kv_formats.Kivi


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """Holds the outputs of a step in rows: up to W tokens of each of R short segments, in order, then one of each of B
    chunks. Without drafts W is 1."""

    tokens: jax.Array  # i32[R W + B] the tokens drawn, -1 where there is none, or NOT_FINITE
    logprobs: jax.Array | None  # f[R W + B] of `tokens`
    top_ids: jax.Array | None  # i32[R W + B, TOP_LOGPROBS], best first
    top_logprobs: jax.Array | None  # f[R W + B, TOP_LOGPROBS]
    prompt_logprobs: jax.Array | None  # as in forward.Logits, likewise the next three
    prompt_ranks: jax.Array | None = None
    prompt_best: jax.Array | None = None
    prompt_best_logprobs: jax.Array | None = None
    nodes: jax.Array | None = None  # i32[R, W] the tree's node that each token was drawn at
    drafted: jax.Array | None = None  # i32[R] verified drafts, if segments have rows for them
    # i32[S, Q - 1] and i32[S], tokens and count of Drafts for the next step, in guided steps with a drafter.
    drafts: tuple[jax.Array, jax.Array] | None = None
    tempered: tuple[jax.Array, jax.Array] | None = None  # logprobs and top_logprobs of logits / temperature
    taps: Taps = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """Selects optional outputs of a step. They are compiled in only if a request asks for them, once for each
    combination."""

    penalties: bool = False
    logprobs: bool = False
    tempered: bool = False  # log-probabilities of logits / temperature beside the raw ones
    prompt_logprobs: bool = False
    guided: bool = False  # two programs: the allowed tokens are put into the state between them
    adapters: bool = False  # rows may take adapters; without it the step is that of an engine without places
    taps: tuple[str, ...] = ()  # values inside the forward pass, by the names in jllm.model.taps
    draws: Draws = Draws.FILTERED  # on a mesh, decides which logits devices exchange: see jllm.step.draws

    def __or__(self, other: "Variant") -> "Variant":
        """Returns a variant that serves both. Both must have the same taps, if they have any."""
        return _both(self, other)

    def covers(self, other: "Variant") -> bool:
        """Returns whether a step of this variant does all that a step of the other does."""
        return self == self | other and other | self == self

    @property
    def takes_rows(self) -> bool:
        """Returns whether the step needs whole rows of logits. The devices of a mesh then have them, and `draws`
        changes nothing."""
        return self.penalties or self.logprobs or self.guided

    @property
    def breadth(self) -> int:
        """Returns how many of the optional outputs the variant has."""
        return sum(getattr(self, name) for name in WANTS) + bool(self.taps)


@cache
def _both(one: Variant, other: Variant) -> Variant:
    """Returns Variant.__or__'s result. It is cached, since each step asks several times."""
    wants = {name: getattr(one, name) or getattr(other, name) for name in (*WANTS, "taps")}
    return replace(one, **wants, draws=max(one.draws, other.draws))


def make_slots(slots: int, max_pages: int, bias: int = 0, adapters: bool = False) -> Slots:
    """Returns S empty slots of M page table entries each. `bias` and `adapters` are as in neutral_sampling."""

    def ints(*shape: int) -> jax.Array:  # a buffer for each field, since all are donated
        return jnp.zeros((slots, *shape), jnp.int32)

    sampling = jax.tree.map(jnp.array, neutral_sampling(slots, bias, adapters))
    return Slots(token=ints(), length=ints(), done=jnp.ones(slots, bool), pages=ints(max_pages), sampling=sampling)


def init_state(
    config: LlamaConfig,
    *,
    slots: int,
    num_pages: int,
    page_size: int = 16,
    max_pages: int | None = None,
    kv_cache: KVCache | None = None,
    dtype: Any = None,
    drafter: Drafter | None = None,
    adapters: bool = False,
) -> State:
    """Returns a state of S empty slots and N empty KV pages of P tokens. A slot may hold max_pages pages, by default
    its share of the pool. kv_cache is the format of K and V or its name, by default that of dtype. dtype defaults to
    the config's. `adapters` is whether steps take params with adapters. Raises ConfigError for an unknown format, and
    for a drafter that does not fit the config."""
    dtype = config.dtype if dtype is None else dtype
    formats = parse_kv_cache(kv_cache, config, dtype)
    table = max(1, num_pages // slots) if max_pages is None else max_pages
    tails = make_tails(config, formats, dtype, slots, page_size, 1 if drafter is None else drafter.tree.size)
    cache = make_cache(config, num_pages, page_size, formats)
    state = place_state(State(cache, make_slots(slots, table, adapters=adapters), tails=tails), config)
    return replace(state, drafts=None if drafter is None else init_drafts(drafter, state, config, dtype))


# The layout of a State on a mesh: sharded by KV heads, or alike on all devices.
_ALIKE = dict.fromkeys(("slots", "counts", "guidance", "drafts", "user", "inputs"), REPLICATED)
SPREAD: Any = State(cache=HEADS, tails=HEADS, **_ALIKE)  # type: ignore[arg-type]


def spread_drafter(drafter: Drafter | None) -> Any:
    """Returns the layout of a drafter on a mesh. A quantized copy's params are in shares like the target's; all else is
    whole."""
    return replace(drafter, params=STACKED) if isinstance(drafter, QuantizedCopy) else REPLICATED  # type: ignore[arg-type]


def place_state(state: State, config: LlamaConfig) -> State:
    """Returns the state, placed as steps on the config's mesh need it. Without a mesh it is unchanged."""
    return place(state, config, SPREAD)


def init_drafts(drafter: Drafter, state: State, config: LlamaConfig, dtype: Any) -> Drafts:
    """Returns empty drafts for the slots and pages of a state. Raises ConfigError for a drafter that does not fit the
    KV format."""
    if state.tails is not None and (isinstance(drafter, QuantizedCopy) or not drafter.tree.is_chain):
        what = "in the model's own pages" if drafter.tree.is_chain else "trees"
        name, others = state.cache.k.format.name, "take ngram, a draft model, or Medusa or EAGLE heads, in a chain"
        raise ConfigError(f"{type(drafter).__name__} drafts {what}, which KV format {name} does not support: {others}")
    (S, M), pool = state.slots.pages.shape, state.cache.k
    sizes = {"slots": S, "num_pages": pool.num_pages, "page_size": pool.page_size, "max_tokens": M * pool.page_size}
    cache, memory = drafter.init(config, dtype, **sizes)
    tree = drafter.tree
    none = jnp.zeros((S, tree.size - 1), jnp.int32), jnp.zeros(S, jnp.int32)
    return place(Drafts(*none, cache, memory, tree), config, REPLICATED)
