"""Perplexity by named protocols, and how far a model is from another: divergence and agreement of top tokens.

    evaluate(model, text, "wikitext2-2048", kv_cache="int8-g8", reference=unquantized).as_row()

The same model on the same text gives quite different perplexities by protocol, so that every output carries its name.
A text becomes tokens, tokens become windows (see jllm.protocols), and windows of all texts together go through the
model as prompts do that are served: in ragged chunks, over the paged KV cache and the kernels of the device. So formats
of weights and of K and V cost here what they cost there. Logits exist for a block of rows at a time.
"""

import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jllm.cache import make_cache, parse_kv_cache
from jllm.config import LlamaConfig
from jllm.engine.options import EngineOptions
from jllm.errors import EvaluationError
from jllm.model import Cache, Paged, backbone, head
from jllm.params import Params
from jllm.pretrained import Model
from jllm.protocols import Protocol, Window, encode, find_protocol, windows_of
from jllm.sampling import token_logprobs
from jllm.step import PROMPT_LOGPROB_ROWS

Text = str | Sequence[int]
Scores = dict[str, np.ndarray]  # by name, of tokens in order


MEASURES = {"perplexity": "nats", "added": "nats", "kl": "kl", "top1": "same"}  # and the sum that each is made of
SCALES = {"perplexity": math.exp, "added": math.expm1}  # of those that are means of nats


@dataclass(frozen=True)
class Part:
    """Sums over one text, or over one window where texts are joined."""

    tokens: int  # scored
    words: int | None  # None where nobody counted them
    nats: float
    reference_nats: float | None = None  # this and what follows: None without a reference
    kl: float | None = None  # in nats
    same: int | None = None  # tokens before which both models find the same next token most likely


@dataclass(frozen=True)
class Evaluation:
    """What evaluate returns; `protocol` is the resolved one."""

    protocol: Protocol
    parts: tuple[Part, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def perplexity(self) -> float:
        return self.measure("perplexity")

    @property
    def added(self) -> float:
        """By how much of itself the reference's perplexity grows."""
        return self.measure("added")

    @property
    def kl(self) -> float:
        """Divergence of the model from the reference, in nats a token."""
        return self.measure("kl")

    @property
    def top1(self) -> float:
        """How often both find the same token most likely."""
        return self.measure("top1")

    def measure(self, name: str) -> float:
        above, below = self._terms(name)
        return SCALES.get(name, float)(math.fsum(above) / math.fsum(below))

    def interval(self, name: str, *, level: float = 0.95, samples: int = 1000, seed: int = 0) -> tuple[float, float]:
        """Of measure(name): percentiles of the bootstrap over parts (Efron, 1979). Raises EvaluationError for one part
        alone."""
        above, below = self._terms(name)
        n = len(above)
        if n < 2:
            raise EvaluationError(f"protocol {self.protocol.name}: an interval takes at least 2 parts, not {n}")
        drawn = np.random.default_rng(seed).integers(n, size=(samples, n))
        values = above[drawn].sum(axis=1) / below[drawn].sum(axis=1)
        low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2]).tolist()
        scale = SCALES.get(name, float)
        return scale(low), scale(high)

    def as_row(self) -> dict[str, Any]:
        """Plain data: the protocol with its numbers, and the figures."""
        p = self.protocol
        row: dict[str, Any] = {"protocol": p.name, "context": p.context, "stride": p.stride, "unit": p.unit}
        row |= {"tokens": self.tokens, "parts": len(self.parts), "perplexity": self.perplexity}
        return row if self.parts[0].kl is None else row | {"added": self.added, "kl": self.kl, "top1": self.top1}

    def _terms(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Sums of the parts and what they are divided by."""
        if name not in MEASURES:
            raise EvaluationError(f"unknown measure {name!r}; known are {', '.join(MEASURES)}")
        if name != "perplexity" and self.parts[0].kl is None:
            raise EvaluationError(f"{name} takes a reference model, and there was none")
        by_word = name in SCALES and self.protocol.unit == "word"
        above = [getattr(part, MEASURES[name]) for part in self.parts]
        below = [part.words if by_word else part.tokens for part in self.parts]
        more = [part.reference_nats for part in self.parts] if name == "added" else 0
        return np.asarray(above, np.float64) - np.asarray(more, np.float64), np.asarray(below, np.float64)


def evaluate(
    model: Model,
    texts: Text | Sequence[Text],
    protocol: str | Protocol = "wikitext2-2048",
    *,
    reference: Model | None = None,
    kv_cache: str | None = None,
    max_slots: int = 8,
    max_step_tokens: int = 512,
    page_size: int = 16,
    backend: str | None = None,
) -> Evaluation:
    """Perplexity of a text or several; with a reference model also the divergence from it on the same tokens.

    Token ids are taken as they are, nothing added. Options are those of EngineOptions; a step takes max_step_tokens of
    up to max_slots windows. The reference keeps K and V in its own dtype. Raises EvaluationError for what can't be
    scored, ConfigError for options.
    """
    EngineOptions(  # checks them
        max_slots, page_size, max_step_tokens=max_step_tokens, kv_cache=kv_cache, backend=backend
    )
    texts = _as_texts(texts)
    protocol = find_protocol(protocol).resolve(model.config)
    models = (model,) if reference is None else (model, reference)
    for other in models[1:]:
        protocol.resolve(other.config)
        _check_same_vocabulary(model, other, texts)
    ids = _encode_all(model, texts, protocol)
    windows = [window for i, tokens in enumerate(ids) for window in windows_of(len(tokens), protocol, i)]
    _check_windows(windows, ids, protocol)
    sizes = _Sizes.of(windows, max_slots, max_step_tokens, page_size)
    scores = _score_windows(models, (kv_cache, None), ids, windows, sizes, backend)
    if protocol.joined:
        return Evaluation(protocol, tuple(_part(scores[i : i + 1], None) for i in range(len(windows))))
    groups: list[list[Scores]] = [[] for _ in ids]
    for window, score in zip(windows, scores, strict=True):
        groups[window.text].append(score)
    return Evaluation(protocol, tuple(_part(g, _words(t)) for g, t in zip(groups, texts, strict=True)))


# From texts to windows


def _as_texts(texts: Text | Sequence[Text]) -> list[Text]:
    several: list = [texts] if isinstance(texts, str) else list(texts)
    if several and isinstance(several[0], (int, np.integer)):
        return [several]
    if not several or len({isinstance(text, str) for text in several}) != 1:
        raise EvaluationError("there must be at least one text, and all are strings or all are lists of token ids")
    return several


def _encode_all(model: Model, texts: list[Text], protocol: Protocol) -> list[np.ndarray]:
    strings = [text for text in texts if isinstance(text, str)]
    if not strings and protocol.unit == "word":
        raise EvaluationError(f"protocol {protocol.name}: words can be counted in strings, not in token ids")
    if protocol.joined:
        strings = ["\n\n".join(strings)] if strings else []
    parts: list[Any] = [encode(model.tokenizer, text, protocol) for text in strings]
    if not strings:
        parts = [np.concatenate([np.asarray(text) for text in texts])] if protocol.joined else texts
    ids, size = [np.asarray(part) for part in parts], model.config.vocab_size
    for tokens in ids:
        if tokens.size and not np.issubdtype(tokens.dtype, np.integer):
            raise EvaluationError(f"token ids must be integers, not {tokens.dtype}")
        outside = tokens[(tokens < 0) | (tokens >= size)]
        if outside.size:
            raise EvaluationError(f"token id {outside[0]} of the text is not in [0, {size}), the model's vocabulary")
    return [tokens.astype(np.int32) for tokens in ids]


def _check_same_vocabulary(model: Model, other: Model, texts: list[Text]) -> None:
    a, b = model.config.vocab_size, other.config.vocab_size
    if a != b:
        raise EvaluationError(f"the models' vocabularies differ: {a} and {b} tokens")
    if None in (model.tokenizer, other.tokenizer) or model.tokenizer is other.tokenizer:
        return
    tokenizers = [m.tokenizer for m in (model, other) if m.tokenizer is not None]
    for text in texts:
        if isinstance(text, str) and len({tuple(t.encode(text)) for t in tokenizers}) > 1:
            raise EvaluationError("the models' vocabularies differ: their tokenizers make different tokens of the text")


def _check_windows(windows: list[Window], ids: list[np.ndarray], protocol: Protocol) -> None:
    for i in sorted(set(range(len(ids))) - {window.text for window in windows}):
        assert protocol.context is not None
        least = protocol.context + protocol.lead if protocol.last == "drop" else 2
        which = "the text" if len(ids) == 1 else f"text {i}"
        raise EvaluationError(f"protocol {protocol.name}: {which} has {len(ids[i])} tokens, a window takes {least}")


def _words(text: Text) -> int | None:
    return len(re.split(r"\s+", text)) if isinstance(text, str) else None  # as lm-eval counts them


# Through the model


@dataclass(frozen=True)
class _Sizes:
    """Shapes of a step: C tokens in at most B chunks; chunk slot b owns pages b * M .. (b + 1) * M."""

    slots: int  # B
    tokens: int  # C
    page_size: int  # P
    max_pages: int  # M

    @classmethod
    def of(cls, windows: list[Window], slots: int, tokens: int, page_size: int) -> "_Sizes":
        """No larger than the windows need."""
        longest, total = max(w.inputs for w in windows), sum(w.inputs for w in windows)
        return cls(min(slots, len(windows)), min(tokens, total), page_size, -(-longest // page_size))


@dataclass(frozen=True)
class _Chunk:
    """Inputs start .. stop of a window, in a slot of the cache."""

    slot: int
    window: int
    start: int
    stop: int


def _part(scores: list[Scores], words: int | None) -> Part:
    """Exact sums, whatever the order."""

    def total(name: str) -> float:
        return math.fsum(x for s in scores for x in s[name])

    tokens = sum(len(s["nats"]) for s in scores)
    if "kl" not in scores[0]:
        return Part(tokens, words, total("nats"))
    return Part(tokens, words, total("nats"), total("reference_nats"), total("kl"), int(total("same")))


def _plan(windows: list[Window], sizes: _Sizes) -> Iterator[list[_Chunk]]:
    """The chunks of each step: windows in order, the oldest first, each in the slot where it began."""
    waiting, free = deque(range(len(windows))), deque(range(sizes.slots))
    running: list[tuple[int, int, int]] = []  # slot, window, inputs done
    while waiting or running:
        while waiting and free:
            running.append((free.popleft(), waiting.popleft(), 0))
        room, chunks, left = sizes.tokens, [], []
        for slot, window, start in running:
            stop = min(windows[window].inputs, start + room)
            room -= stop - start
            if stop > start:
                chunks.append(_Chunk(slot, window, start, stop))
            if stop < windows[window].inputs:
                left.append((slot, window, stop))
            else:
                free.append(slot)
        running = left
        yield chunks


def _pack(chunks: list[_Chunk], ids: list[np.ndarray], windows: list[Window], sizes: _Sizes) -> tuple[Paged, Any]:
    """One step without decode rows, and the targets i32[C] of its rows; unused rows write nothing."""
    B, C, P, M = sizes.slots, sizes.tokens, sizes.page_size, sizes.max_pages
    tokens, targets, positions, offset = (np.zeros(C, np.int32) for _ in range(4))
    page = np.full(C, B * M, np.int32)
    chunk_pages, lengths = np.zeros((B, M), np.int32), np.zeros(B, np.int32)
    cu = np.zeros(B + 1, np.int32)
    for b, chunk in enumerate(chunks):
        window, at = windows[chunk.window], cu[b]
        rows = slice(at, at + chunk.stop - chunk.start)
        text = ids[window.text][window.start : window.stop]
        position = np.arange(chunk.start, chunk.stop)
        tokens[rows], targets[rows] = text[position], text[position + 1]
        positions[rows], offset[rows] = position, position % P
        page[rows] = chunk.slot * M + position // P
        chunk_pages[b], lengths[b] = chunk.slot * M + np.arange(M), chunk.stop
        cu[b + 1 :] = rows.stop
    decodes = np.zeros((0, M), np.int32), np.zeros(0, np.int32)
    return Paged(tokens, positions, page, offset, *decodes, chunk_pages, cu, lengths), targets  # type: ignore[arg-type]


@partial(jax.jit, static_argnames=("configs", "backend"), donate_argnames="caches")
def score_step(
    params: tuple[Params, ...],
    caches: tuple[Cache, ...],
    batch: Paged,
    targets: jax.Array,
    *,
    configs: tuple[LlamaConfig, ...],
    backend: str | None,
) -> tuple[tuple[Cache, ...], dict[str, jax.Array]]:
    """A step of prompt chunks through one model, or through it and its reference: the caches, and of each row f[C]
    "nats" (-log p of its target), and with a reference also "reference_nats", "kl" and bool "same"."""
    states = [backbone(p, c, batch, cache, backend=backend) for p, c, cache in zip(params, configs, caches)]
    C = targets.shape[0]
    block = min(PROMPT_LOGPROB_ROWS, C)
    pad = -C % block
    rows = [jnp.pad(x, ((0, pad), (0, 0))).reshape(-1, block, x.shape[1]) for x, _ in states]

    def one(x):
        logits = [head(p, c, h, backend=backend) for p, c, h in zip(params, configs, x[0])]
        nats = [-token_logprobs(rows, x[1]) for rows in logits]
        if len(logits) == 1:
            return {"nats": nats[0]}
        return {"nats": nats[0], "reference_nats": nats[1]} | _difference(logits[1], logits[0])

    out = jax.lax.map(one, (rows, jnp.pad(targets, (0, pad)).reshape(-1, block)))
    return tuple(cache for _, cache in states if cache is not None), {key: x.reshape(-1)[:C] for key, x in out.items()}


def _difference(reference: jax.Array, logits: jax.Array) -> dict[str, jax.Array]:
    """Of rows [R, V]: Kullback-Leibler divergence from the reference, and whether both have the same top token.

    With p and q the reference's and the model's probabilities and d = log p - log q, it is the sum of
    p (d + exp(-d) - 1), since p and q both add up to 1. Each term is >= 0, and what rounding shifts d by counts with
    its square only, so that float32 does for divergences far below its rounding of log p.
    """
    p, q = jax.nn.log_softmax(reference), jax.nn.log_softmax(logits.astype(reference.dtype))
    d = p - q
    kl = jnp.sum(jnp.exp(p) * (d + jnp.expm1(-d)), axis=1)
    return {"kl": kl, "same": reference.argmax(axis=1) == logits.argmax(axis=1)}


def _score_windows(
    models: tuple[Model, ...],
    kv_caches: tuple[str | None, ...],
    ids: list[np.ndarray],
    windows: list[Window],
    sizes: _Sizes,
    backend: str | None,
) -> list[Scores]:
    """Of each window. The next step is dispatched before the scores of one are read."""
    params, configs = tuple(m.params for m in models), tuple(m.config for m in models)
    formats = [parse_kv_cache(kv, m.config, m.params.norm.dtype) for kv, m in zip(kv_caches, models)]
    num_pages = sizes.slots * sizes.max_pages
    caches = tuple(make_cache(c, num_pages, sizes.page_size, f) for c, f in zip(configs, formats))
    scores: list[list[Scores]] = [[] for _ in windows]

    def read(chunks: list[_Chunk], out: dict[str, jax.Array]) -> None:
        host, at = jax.device_get(out), 0
        for chunk in chunks:
            n = chunk.stop - chunk.start
            scores[chunk.window].append({key: x[at : at + n] for key, x in host.items()})
            at += n
            bar.update(n)

    in_flight: tuple[list[_Chunk], dict[str, jax.Array]] | None = None
    total = sum(window.inputs for window in windows)
    with tqdm(total=total, desc="scoring", unit="token", delay=2, leave=False, disable=None) as bar:
        for chunks in _plan(windows, sizes):
            batch, targets = _pack(chunks, ids, windows, sizes)
            caches, out = score_step(params, caches, batch, targets, configs=configs, backend=backend)
            if in_flight is not None:
                read(*in_flight)
            in_flight = chunks, out
        if in_flight is not None:
            read(*in_flight)
    return [_scored(window, pieces) for window, pieces in zip(windows, scores, strict=True)]


def _scored(window: Window, pieces: list[Scores]) -> Scores:
    """Of a window's scored tokens, from its chunks. Input i predicts token start + i + 1."""
    first = window.scored - window.start - 1
    joined = {key: np.concatenate([piece[key] for piece in pieces])[first:] for key in pieces[0]}
    if not np.isfinite(joined["nats"]).all():
        where = f"tokens {window.start} .. {window.stop} of text {window.text}"
        raise EvaluationError(f"the model's logits are not finite within {where}")
    return joined
