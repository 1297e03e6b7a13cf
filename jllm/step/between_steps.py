"""Changes the state between steps: pages are copied, masks are put, and tokens are remembered."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.config import MAX_LOGIT_BIAS, LlamaConfig
from jllm.model.backbone import Cache, Taps
from jllm.model.cache import COPIES, jit_copy_pages
from jllm.model.hooks import Hooks
from jllm.model.paged import NOWHERE
from jllm.model.sampling import make_counts, words
from jllm.speculative.drafter import Drafter
from jllm.speculative.forced import coming_tokens
from jllm.speculative.tree import Tree
from jllm.step.state import Guidance, State, Variant, make_slots, place_state

MASKS = (4, 32)  # guided samples that one call puts into the state: few sizes, compiled at first use
PUT = 8  # requests whose inputs one call puts into the state; fewer take a call each
REMEMBERED = 512  # tokens that one call gives a drafter or hooks


def pools(state: State) -> tuple[Cache, ...]:
    """Returns all pools of pages: the model's, and those of a drafter, which share its page tables."""
    own = () if state.drafts is None else state.drafts.cache
    return (state.cache, own) if own else (state.cache,)


def padded(pages: Sequence[int], filler: int) -> np.ndarray:
    """Returns these pages and fillers up to the next power of two, i32[n], so that few sizes are compiled."""
    return np.fromiter(chain(pages, repeat(filler)), np.int32, 1 << max(0, len(pages) - 1).bit_length())


def copy_pages(state: State, copies: Sequence[tuple[int, int]]) -> State:
    """Copies pages (from, to) in all pools. No page is both a source and a target."""
    for at in range(0, len(copies), COPIES):
        pages = np.full((COPIES, 2), NOWHERE, np.int32)
        some = copies[at : at + COPIES]
        pages[: len(some)] = some
        cache, *of_drafts = jit_copy_pages(pools(state), pages)
        if state.drafts is not None and of_drafts:
            state = replace(state, drafts=replace(state.drafts, cache=of_drafts[0]))
        state = replace(state, cache=cache)
    return state


def guide(state: State, slots: Sequence[int], allowed: np.ndarray, coming: np.ndarray) -> State:
    """Returns the state with new guidance for these slots: their allowed tokens and their coming tokens. Shapes are
    u32[n, nodes, ceil(V / 32)] and i32[n, F], as in Guidance."""
    assert len(slots) == len(allowed) == len(coming), "each slot has masks of its own"
    for at in range(0, len(slots), MASKS[-1]):
        some = slice(at, at + MASKS[-1])
        size = next(size for size in MASKS if size >= len(slots[some]))
        where = np.full(size, NOWHERE, np.int32)
        where[: len(slots[some])] = slots[some]
        new = (np.resize(x[some], (size, *x.shape[1:])) for x in (allowed, coming))
        state = replace(state, guidance=put_masks(state.guidance, where, *new))
    return state


@partial(jax.jit, donate_argnames="guidance")
def put_masks(guidance: Guidance, slots: jax.Array, allowed: jax.Array, coming: jax.Array) -> Guidance:
    """Returns guidance with new values for i32[n] slots, at their first `allowed.shape[1]` nodes."""
    return Guidance(
        guidance.allowed.at[slots, : allowed.shape[1]].set(allowed, mode="drop"),
        guidance.coming.at[slots].set(coming, mode="drop"),
    )


def put_inputs(state: State, slots: Sequence[int], given: Sequence[Any]) -> State:
    """Returns the state with the inputs of these slots: for each a pytree of arrays on the host."""
    inputs, at = state.inputs, 0
    while at < len(slots):
        count = PUT if len(slots) - at >= PUT else 1
        new = jax.tree.map(lambda *each: np.stack(each), *given[at : at + count])
        inputs = put_arrays(inputs, np.asarray(slots[at : at + count], np.int32), new)
        at += count
    return replace(state, inputs=inputs)


@partial(jax.jit, donate_argnames="inputs")
def put_arrays(inputs: Any, slots: jax.Array, new: Any) -> Any:
    """Returns a pytree of arrays of slots [S, ...] with new ones [n, ...] at i32[n] slots."""
    return jax.tree.map(lambda old, some: old.at[slots].set(some), inputs, new)


@partial(jax.jit, static_argnames="count")
def first_rows(taps: Taps, count: int) -> Taps:
    """Returns the first rows of tapped values, which are fewer to copy to the host."""
    return {name: value[:count] for name, value in taps.items()}


def remember(state: State, drafter: Drafter | None, hooks: Hooks | None, slot: int, tokens: Sequence[int]) -> State:
    """Gives the drafter and hooks the first tokens of a slot's sequence. Returns the state after that."""
    for start in range(0, len(tokens), REMEMBERED):
        some = tokens[start : start + REMEMBERED]
        padded = np.zeros(REMEMBERED, np.int32)
        padded[: len(some)] = some
        where = np.asarray([slot, start, len(some)], np.int32)
        if drafter is not None and state.drafts is not None:
            memory = _drafter_remembers(drafter, state.drafts.memory, where, padded)
            state = replace(state, drafts=replace(state.drafts, memory=memory))
        if hooks is not None and hooks.observe is not None:
            state = replace(state, user=_hooks_observe(hooks, state.user, state.inputs, where, padded))
    return state


@partial(jax.jit, donate_argnames="memory")
def _drafter_remembers(drafter: Drafter, memory: Any, where: jax.Array, tokens: jax.Array) -> Any:
    """Returns a drafter's memory with tokens i32[REMEMBERED] of a sequence. `where` is its slot, the first token's
    index, and the number of valid tokens."""
    slot, start, count = where
    return drafter.remember(memory, slot, tokens, start, count)


@jax.jit
def _hooks_observe(hooks: Hooks, user: Any, inputs: Any, where: jax.Array, tokens: jax.Array) -> Any:
    """Returns State.user after the tokens. Arguments are as in _drafter_remembers."""
    (slot, start, count), i = where, jnp.arange(REMEMBERED, dtype=jnp.int32)
    return hooks.see(user, jnp.where(i < count, slot, NOWHERE), start + i, tokens, inputs)


def as_asked(state: State, variant: Variant, config: LlamaConfig, tree: Tree, home: jax.Device | None) -> State:
    """Returns the state with penalties and token masks iff the variant has them. Masks are for the nodes of `tree`.
    `home` is the one device of new arrays; None is JAX's choice."""
    state = _with_penalties(state, variant.penalties, config, home)
    if variant.guided == (state.guidance is not None):
        return state
    guidance = None
    if variant.guided:
        S = state.slots.token.shape[0]
        with jax.default_device(home):
            allowed = ~jnp.zeros((S, tree.size, words(config.vocab_size)), jnp.uint32)
            guidance = Guidance(allowed, jnp.full((S, coming_tokens(tree)), -1, jnp.int32))
    return place_state(replace(state, guidance=guidance), config)


def _with_penalties(state: State, wanted: bool, config: LlamaConfig, home: jax.Device | None) -> State:
    """Returns the state with penalties iff they are wanted. Penalties exist only while an unfinished request asks for
    them. They start neutral, which is right for the sequences that run already: none of them asked."""
    if wanted == (state.counts is not None):
        return state
    S = state.slots.token.shape[0]
    with jax.default_device(home):
        neutral = make_slots(S, 0, MAX_LOGIT_BIAS).sampling.penalties if wanted else None
        counts = make_counts(S, config.vocab_size) if wanted else None
    slots = replace(state.slots, sampling=replace(state.slots.sampling, penalties=neutral))
    return place_state(replace(state, slots=slots, counts=counts), config)
