"""Runs windows of token ids through models like served prompts: in ragged chunks, over the paged KV cache.

This is the array side of jllm.analysis.evaluate. It compiles one layer, which all layers of one format share, and the
scoring of a block of rows. The rest of a step runs op by op. So a sweep over many schemes compiles one layer each, and
nothing of the reference.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jllm.analysis.protocols import Window
from jllm.config import LlamaConfig
from jllm.errors import EvaluationError
from jllm.model.backbone import backbone, head
from jllm.model.cache import Cache, KVCache, make_cache, make_tails, parse_kv_cache, with_tails
from jllm.model.model import Model
from jllm.model.paged import Chunks, Paged, no_segments, paged_batch
from jllm.model.params import Params
from jllm.model.sampling import token_logprobs
from jllm.step.forward import PROMPT_LOGPROB_ROWS

Scores = dict[str, np.ndarray]  # values of tokens in order, by name
lay_out = jax.jit(paged_batch, static_argnames=("num_pages", "page_size"))


@dataclass(frozen=True)
class Sizes:
    """Holds the shapes of a step. It has C tokens in at most B chunks; chunk slot b owns pages b * M .. (b + 1) * M."""

    slots: int  # B
    tokens: int  # C
    page_size: int  # P
    max_pages: int  # M

    @classmethod
    def of(cls, windows: Sequence[Window], slots: int, tokens: int, page_size: int) -> "Sizes":
        """Returns sizes that are no larger than the windows need."""
        longest, total = max(w.inputs for w in windows), sum(w.inputs for w in windows)
        return cls(min(slots, len(windows)), min(tokens, total), page_size, -(-longest // page_size))


@dataclass(frozen=True)
class Chunk:
    """Is a range of inputs begin .. end of a window, in a slot of the cache."""

    slot: int
    window: int
    begin: int
    end: int


def plan(windows: Sequence[Window], sizes: Sizes) -> Iterator[list[Chunk]]:
    """Yields the chunks of each step. The oldest windows come first, and each keeps its slot."""
    waiting, free = deque(range(len(windows))), deque(range(sizes.slots))
    running: list[tuple[int, int, int]] = []  # slot, window, inputs done
    while waiting or running:
        while waiting and free:
            running.append((free.popleft(), waiting.popleft(), 0))
        room, chunks, left = sizes.tokens, [], []
        for slot, window, begin in running:
            end = min(windows[window].inputs, begin + room)
            room -= end - begin
            if end > begin:
                chunks.append(Chunk(slot, window, begin, end))
            if end < windows[window].inputs:
                left.append((slot, window, end))
            else:
                free.append(slot)
        running = left
        yield chunks


def pack(
    chunks: list[Chunk], ids: Sequence[np.ndarray], windows: Sequence[Window], sizes: Sizes
) -> tuple[Paged, np.ndarray]:
    """Returns one step of prompt chunks, and the targets i32[C] of its rows. Unused rows write nothing."""
    B, C, M = sizes.slots, sizes.tokens, sizes.max_pages
    tokens, targets = np.zeros(C, np.int32), np.zeros(C, np.int32)
    start, lengths, pages = np.zeros(B, np.int32), np.zeros(B, np.int32), np.zeros((B, M), np.int32)
    slots = np.zeros(B, np.int32)
    at = 0
    for b, chunk in enumerate(chunks):
        window, n = windows[chunk.window], chunk.end - chunk.begin
        text = ids[window.text][window.start : window.stop]
        tokens[at : at + n] = text[chunk.begin : chunk.end]
        targets[at : at + n] = text[chunk.begin + 1 : chunk.end + 1]
        start[b], lengths[b], slots[b] = chunk.begin, n, chunk.slot
        pages[b] = chunk.slot * M + np.arange(M)
        at += n
    rows = Chunks(tokens, start, lengths, pages)  # type: ignore[arg-type]
    pool = {"num_pages": B * M, "page_size": sizes.page_size, "slots": (np.zeros(0, np.int32), slots)}
    return lay_out(no_segments(M), rows, **pool), targets


@partial(jax.jit, static_argnames=("configs", "backend"))
def score_rows(
    heads: tuple[Params, ...],
    states: tuple[jax.Array, ...],
    targets: jax.Array,
    *,
    configs: tuple[LlamaConfig, ...],
    backend: str | None,
) -> dict[str, jax.Array]:
    """Returns scores of hidden states [C, E], by name: "nats" f[C], the -log p of each row's target. With a reference
    it adds "reference_nats", "kl" and bool "same".

    heads, states and configs are of the model, or of the model and the reference. Logits exist only for a block of rows
    at a time.
    """
    C = targets.shape[0]
    block = min(PROMPT_LOGPROB_ROWS, C)
    pad = -C % block
    rows = [jnp.pad(x, ((0, pad), (0, 0))).reshape(-1, block, x.shape[1]) for x in states]

    def one(x):
        logits = [head(p, c, h, backend=backend) for p, c, h in zip(heads, configs, x[0])]
        nats = [-token_logprobs(rows, x[1]) for rows in logits]
        if len(logits) == 1:
            return {"nats": nats[0]}
        return {"nats": nats[0], "reference_nats": nats[1]} | difference(logits[1], logits[0])

    out = jax.lax.map(one, (rows, jnp.pad(targets, (0, pad)).reshape(-1, block)))
    return {key: x.reshape(-1)[:C] for key, x in out.items()}


def difference(reference: jax.Array, logits: jax.Array) -> dict[str, jax.Array]:
    """Returns the divergence of rows [R, V] from the reference, and whether both have the same top token.

    Let p be the reference's probabilities, q the model's, and d = log p - log q. As p and q both sum to 1, the
    Kullback-Leibler divergence is the sum of p (d + exp(-d) - 1). Each term is >= 0. A rounding error of d enters only
    squared, so float32 resolves divergences far below log p's rounding. Where q is far above p, the term is p (d - 1) +
    q: there exp(-d) may overflow, and p may underflow.
    """
    p, q = jax.nn.log_softmax(reference), jax.nn.log_softmax(logits.astype(reference.dtype))
    d = p - q
    near = jnp.exp(p) * (d + jnp.expm1(jnp.minimum(-d, 1)))
    kl = jnp.sum(jnp.where(d > -1, near, jnp.exp(p) * (d - 1) + jnp.exp(q)), axis=1)
    return {"kl": kl, "same": reference.argmax(axis=1) == logits.argmax(axis=1)}


@dataclass(frozen=True)
class Reader:
    """Is a model that reads windows step by step, or its recorded `states` by window [inputs, E]."""

    model: Model
    kv_cache: KVCache | None = None
    states: tuple[np.ndarray, ...] | None = None

    def of(self, windows: Sequence[int]) -> "Reader":
        """Returns a reader of only these windows, in this order."""
        return self if self.states is None else replace(self, states=tuple(self.states[i] for i in windows))

    def begin(self, sizes: Sizes) -> Cache | None:
        """Returns an empty cache, or None if the states are recorded."""
        if self.states is not None:
            return None
        c = self.model.config
        formats, dtype = parse_kv_cache(self.kv_cache, c, self.model.params.dtype), self.model.params.dtype
        cache = make_cache(c, sizes.slots * sizes.max_pages, sizes.page_size, formats)
        return with_tails(cache, make_tails(c, formats, dtype, sizes.slots, sizes.page_size))

    def read(
        self, batch: Paged, chunks: list[Chunk], cache: Cache | None, backend: str | None
    ) -> tuple[jax.Array, Cache | None]:
        """Returns the hidden states [C, E] of a step's rows, and the cache after it."""
        if self.states is None:
            return backbone(self.model.params, self.model.config, batch, cache, backend=backend)
        known = np.concatenate([self.states[chunk.window][chunk.begin : chunk.end] for chunk in chunks])
        return jnp.asarray(np.pad(known, ((0, batch.tokens.shape[0] - len(known)), (0, 0)))), cache

    @property
    def head(self) -> Params:
        """Returns the weights that logits need. Their shapes do not depend on the layers' formats."""
        return replace(self.model.params, layers=())


def score_windows(
    readers: tuple[Reader, ...],
    ids: Sequence[np.ndarray],
    windows: Sequence[Window],
    sizes: Sizes,
    backend: str | None,
    known: Mapping[int, Scores] = MappingProxyType({}),
    scored: Callable[[int, Scores], None] = lambda window, scores: None,
) -> list[Scores]:
    """Returns the scores of each window's scored tokens, by a model and perhaps its reference. `known` scores are
    reused, by window number. `scored` is called with every other window when it is done."""
    heads, configs = tuple(r.head for r in readers), tuple(r.model.config for r in readers)

    def score(states: tuple[jax.Array, ...], targets: np.ndarray) -> dict[str, jax.Array]:
        return score_rows(heads, states, jnp.asarray(targets), configs=configs, backend=backend)

    numbers = [i for i in range(len(windows)) if i not in known]
    made = dict(known)

    def finish(i: int, pieces: list[Scores]) -> None:
        made[numbers[i]] = _scored(windows[numbers[i]], pieces)
        scored(numbers[i], made[numbers[i]])

    _run(
        tuple(r.of(numbers) for r in readers),
        score,
        ids,
        [windows[i] for i in numbers],
        sizes,
        backend,
        "scoring",
        finish,
    )
    return [made[i] for i in range(len(windows))]


def read_states(
    reader: Reader, ids: Sequence[np.ndarray], windows: Sequence[Window], sizes: Sizes, backend: str | None
) -> tuple[np.ndarray, ...]:
    """Returns the hidden states of each window's inputs [inputs, E], on the host."""
    found: dict[int, np.ndarray] = {}

    def finish(i: int, pieces: list[Scores]) -> None:
        found[i] = np.concatenate([piece["x"] for piece in pieces])

    _run((reader,), lambda states, _: {"x": states[0]}, ids, windows, sizes, backend, "reading", finish)
    return tuple(found[i] for i in range(len(windows)))


def _run(readers, make, ids, windows, sizes: Sizes, backend: str | None, desc: str, finish) -> None:
    """Runs make(states, targets) for every step, and finish(window, pieces) for every complete window. It dispatches
    the next step before it reads the results of the previous one."""
    caches = [reader.begin(sizes) for reader in readers]
    pieces: list[list[Scores]] = [[] for _ in windows]

    def take(chunks: list[Chunk], out: dict[str, jax.Array]) -> None:
        host, at = jax.device_get(out), 0
        for chunk in chunks:
            n = chunk.end - chunk.begin
            pieces[chunk.window].append({key: x[at : at + n] for key, x in host.items()})
            at += n
            bar.update(n)
            if chunk.end == windows[chunk.window].inputs:
                finish(chunk.window, pieces[chunk.window])
                pieces[chunk.window] = []

    in_flight: tuple[list[Chunk], dict[str, jax.Array]] | None = None
    total = sum(window.inputs for window in windows)
    with tqdm(total=total, desc=desc, unit="token", delay=2, leave=False, disable=None) as bar:
        for chunks in plan(windows, sizes):
            batch, targets = pack(chunks, ids, windows, sizes)
            states = []
            for i, reader in enumerate(readers):
                x, caches[i] = reader.read(batch, chunks, caches[i], backend)
                states.append(x)
            out = make(tuple(states), targets)
            if in_flight is not None:
                take(*in_flight)
            in_flight = chunks, out
        if in_flight is not None:
            take(*in_flight)


def _scored(window: Window, pieces: list[Scores]) -> Scores:
    """Returns the scores of a window, from its chunks. Input i predicts token start + i + 1."""
    first = window.scored - window.start - 1
    joined = {key: np.concatenate([piece[key] for piece in pieces])[first:] for key in pieces[0]}
    if not np.isfinite(joined["nats"]).all():
        where = f"tokens {window.start} .. {window.stop} of text {window.text}"
        raise EvaluationError(f"the model's logits are not finite within {where}")
    return joined
