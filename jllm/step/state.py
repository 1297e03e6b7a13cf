"""What a step takes besides params and a batch, and what it returns: State with its Slots, Outputs, and Variant, which
says what the outputs have."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.model.backbone import Cache, Taps
from jllm.model.cache import KVCache, Tails, make_cache, make_tails, parse_kv_cache
from jllm.model.sampling import Draws, Sampling, TokenCounts, neutral_sampling
from jllm.parallel.ranks import HEADS, STACKED, WHOLE, place
from jllm.speculative.drafter import Drafter, Drafts
from jllm.speculative.quantized_copy import QuantizedCopy

TOP_LOGPROBS = 20
WANTS = ("penalties", "logprobs", "prompt_logprobs", "guided")  # of a variant: what single requests ask for
NOT_FINITE = -2  # in place of a token: the row's logits hold NaN or infinity, and the slot is done


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Holds what the device knows of each batch slot.

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
    """What guides allow in the step at hand, for each slot. Q: the nodes of the drafter's tree, 1 without one."""

    allowed: jax.Array  # u32[S, Q, ceil(V / 32)], the tokens that may be drawn at each node as bits
    coming: jax.Array  # i32[S, F], those that are probably drawn from this step on, padded with -1: see forced.py


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Holds everything that the model remembers between steps. `user` is a pytree of the caller's own [S, ...], which
    hooks read and observe.

    Here is a model of two layers with K = 2 KV heads of D = 64, after init_state(config, slots=3, num_pages=8,
    page_size=16, max_pages=4) in bf16:

        cache   one KVPages for each of the two layers; its k and v have values bf16[8, 2, 16, 64]
        slots   token i32[3], length i32[3], done bool[3], pages i32[3, 4]

    The other fields are None. A step returns a state of the same shapes.
    """

    cache: Cache
    slots: Slots
    counts: TokenCounts | None = None  # [S, V], only while penalties are asked for
    guidance: Guidance | None = None  # only while guides are asked for
    drafts: Drafts | None = None  # only with a drafter
    user: Any = None
    tails: Tails | None = None  # of the slots; only where K is stored as kv_formats.Kivi


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What a step yields, in rows: up to W tokens of each of R short segments, in order, then one of each of B chunks.
    Without drafts W is 1."""

    tokens: jax.Array  # i32[R W + B] the tokens drawn, -1 where there is none, or NOT_FINITE
    logprobs: jax.Array | None  # f[R W + B] of these
    top_ids: jax.Array | None  # i32[R W + B, TOP_LOGPROBS], best first
    top_logprobs: jax.Array | None  # f[R W + B, TOP_LOGPROBS]
    prompt_logprobs: jax.Array | None  # as step_forward.Logits has them
    prompt_ranks: jax.Array | None = None
    prompt_best: jax.Array | None = None
    prompt_best_logprobs: jax.Array | None = None
    nodes: jax.Array | None = None  # i32[R, W] of a tree, which node each token was drawn at
    drafted: jax.Array | None = None  # i32[R] drafts that were verified, where segments have rows for them
    # i32[S, Q - 1] and i32[S], tokens and count of Drafts for the step after this one; of guided steps with a drafter.
    drafts: tuple[jax.Array, jax.Array] | None = None
    taps: Taps = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """Optional outputs of a step, compiled in only where a request asks for them; each combination is compiled once."""

    penalties: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    guided: bool = False  # such a step is two programs: what may be drawn is put into the state between them
    taps: tuple[str, ...] = ()  # values inside the forward pass, by names of jllm.model.taps
    draws: Draws = Draws.FILTERED  # on a mesh, what its devices must tell each other of logits: see parallel.draws

    def __or__(self, other: "Variant") -> "Variant":
        """Returns what serves both. Their taps are the same."""
        wants = {name: getattr(self, name) or getattr(other, name) for name in WANTS}
        return replace(self, **wants, draws=max(self.draws, other.draws))

    def covers(self, other: "Variant") -> bool:
        """Returns whether a step of this variant does all that one of the other does."""
        return self == self | other and other | self == self

    @property
    def takes_rows(self) -> bool:
        """Returns whether it takes whole rows of logits, which devices of a mesh then have: `draws` changes nothing."""
        return self.penalties or self.logprobs or self.guided

    @property
    def breadth(self) -> int:
        """Returns how many things it does that requests ask for."""
        return sum(getattr(self, name) for name in WANTS)


def make_slots(slots: int, max_pages: int, bias: int = 0) -> Slots:
    """Returns S empty slots of M page table entries each. bias: X, logit bias entries of a slot; 0 leaves out
    penalties."""

    def ints(*shape: int) -> jax.Array:  # each field its own buffer, since all are donated
        return jnp.zeros((slots, *shape), jnp.int32)

    sampling = jax.tree.map(jnp.array, neutral_sampling(slots, bias))
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
) -> State:
    """Returns a state of S empty slots and N empty KV pages of P tokens. A slot may hold max_pages pages, by default
    its share of the pool. kv_cache is or names the format of K and V, by default that of dtype, which defaults to the
    config's. Raises ConfigError for an unknown format, and for a drafter that does not fit the config."""
    dtype = config.dtype if dtype is None else dtype
    formats = parse_kv_cache(kv_cache, config, dtype)
    table = max(1, num_pages // slots) if max_pages is None else max_pages
    tails = make_tails(config, formats, dtype, slots, page_size, 1 if drafter is None else drafter.tree.size)
    cache = make_cache(config, num_pages, page_size, formats)
    state = place_state(State(cache, make_slots(slots, table), tails=tails), config)
    return replace(state, drafts=None if drafter is None else init_drafts(drafter, state, config, dtype))


# What of a State devices of a mesh have by KV heads, and what is alike on all of them.
SPREAD: Any = State(cache=HEADS, slots=WHOLE, counts=WHOLE, guidance=WHOLE, drafts=WHOLE, user=WHOLE, tails=HEADS)  # type: ignore[arg-type]


def spread_drafter(drafter: Drafter | None) -> Any:
    """Returns what of a drafter devices of a mesh have in shares: a copy's params, as the target's; others are
    whole."""
    return replace(drafter, params=STACKED) if isinstance(drafter, QuantizedCopy) else WHOLE  # type: ignore[arg-type]


def place_state(state: State, config: LlamaConfig) -> State:
    """Returns the state where steps on the config's mesh want it; without a mesh as it is."""
    return place(state, config, SPREAD)


def init_drafts(drafter: Drafter, state: State, config: LlamaConfig, dtype: Any) -> Drafts:
    """No drafts yet, for the slots and pages of a state; see init_state."""
    if state.tails is not None and (isinstance(drafter, QuantizedCopy) or not drafter.tree.is_chain):
        what = "by the model's own pages" if drafter.tree.is_chain else "trees"
        name, others = state.cache[0].k.format.name, "take ngram, a draft model, or Medusa or EAGLE heads, in a chain"
        raise ConfigError(f"{type(drafter).__name__} drafts {what}, which KV format {name} does not have: {others}")
    (S, M), pool = state.slots.pages.shape, state.cache[0].k
    sizes = {"slots": S, "num_pages": pool.num_pages, "page_size": pool.page_size, "max_tokens": M * pool.page_size}
    cache, memory = drafter.init(config, dtype, **sizes)
    tree = drafter.tree
    none = jnp.zeros((S, tree.size - 1), jnp.int32), jnp.zeros(S, jnp.int32)
    return place(Drafts(*none, cache, memory, tree), config, WHOLE)
