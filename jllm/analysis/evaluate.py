"""Measures perplexity by named protocols, and a model's divergence and top-token agreement with a reference.

    evaluate(model, text, "wikitext2-2048", kv_cache="int8-g8", reference=unquantized).as_row()

The same model and text give quite different perplexities by protocol, so every output carries its protocol's name. A
text becomes tokens, and tokens become windows (see jllm.analysis.protocols). Windows of all texts run together like
served prompts: in ragged chunks, over the paged KV cache, with the device's kernels. So formats of weights and of K and
V lose the same accuracy here as in serving. Logits exist only for a block of rows at a time.
"""

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jllm.analysis.progress import digest_of, fingerprint, open_progress
from jllm.analysis.protocols import Protocol, Window, encode, find_protocol, windows_of
from jllm.analysis.scoring import Reader, Scores, Sizes, read_states, score_windows
from jllm.engine.options import EngineOptions
from jllm.errors import EvaluationError
from jllm.files.run_identity import of_machine
from jllm.model.cache import KVCache
from jllm.model.model import Model

Text = str | Sequence[int]


MEASURES = {"perplexity": "nats", "added": "nats", "kl": "kl", "top1": "same"}  # and the sum behind each
SCALES = {"perplexity": math.exp, "added": math.expm1}  # for means of nats


@dataclass(frozen=True)
class Part:
    """Holds sums over one text, or over one window if texts are joined."""

    tokens: int  # number of scored tokens
    words: int | None  # None: not counted
    nats: float
    reference_nats: float | None = None  # None without a reference, as are the next two
    kl: float | None = None  # in nats
    same: int | None = None  # tokens for which both models have the same most likely token


@dataclass(frozen=True)
class Evaluation:
    """Holds the result of evaluate. `protocol` is the resolved one."""

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
        """Returns the relative growth of the perplexity over the reference's."""
        return self.measure("added")

    @property
    def kl(self) -> float:
        """Returns the Kullback-Leibler divergence from the reference, in nats per token."""
        return self.measure("kl")

    @property
    def top1(self) -> float:
        """Returns the share of tokens for which both models have the same most likely token."""
        return self.measure("top1")

    def measure(self, name: str) -> float:
        above, below = self._terms(name)
        return SCALES.get(name, float)(math.fsum(above) / math.fsum(below))

    def interval(
        self,
        name: str,
        *,
        over: "Evaluation | None" = None,
        level: float = 0.95,
        samples: int = 1000,
        seed: int = 0,
    ) -> tuple[float, float]:
        """Returns the confidence interval of measure(name), from the bootstrap over parts (Efron, 1979).

        With `over`, an evaluation of the same parts, the interval is that of a comparison. Both are resampled alike. It
        is the difference of kl or top1, the ratio of perplexity, or that ratio less one for added.

        Raises EvaluationError for a single part, and if the parts differ.
        """
        above, below = self._terms(name)
        n = len(above)
        if over is not None:
            other, tokens = over._terms(name)
            if not np.array_equal(tokens, below):
                raise EvaluationError("compare only evaluations of the same texts by the same protocol")
            above = above - other
        if n < 2:
            raise EvaluationError(f"protocol {self.protocol.name}: an interval takes at least 2 parts, not {n}")
        drawn = np.random.default_rng(seed).integers(n, size=(samples, n))
        values = above[drawn].sum(axis=1) / below[drawn].sum(axis=1)
        low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2]).tolist()
        scale = SCALES.get(name, float)
        return scale(low), scale(high)

    def as_row(self) -> dict[str, Any]:
        """Returns a plain dict: the protocol's settings and the measures."""
        p = self.protocol
        row: dict[str, Any] = {"protocol": p.name, "context": p.context, "stride": p.stride, "unit": p.unit}
        row |= {"tokens": self.tokens, "parts": len(self.parts), "perplexity": self.perplexity}
        return row if self.parts[0].kl is None else row | {"added": self.added, "kl": self.kl, "top1": self.top1}

    def _terms(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numerators and denominators of a measure, by part."""
        if name not in MEASURES:
            raise EvaluationError(f"unknown measure {name!r}; known are {', '.join(MEASURES)}")
        if name != "perplexity" and self.parts[0].kl is None:
            raise EvaluationError(f"{name} takes a reference model, and there was none")
        by_word = name in SCALES and self.protocol.unit == "word"
        above = [getattr(part, MEASURES[name]) for part in self.parts]
        below = [part.words if by_word else part.tokens for part in self.parts]
        more = [part.reference_nats for part in self.parts] if name == "added" else 0
        return np.asarray(above, np.float64) - np.asarray(more, np.float64), np.asarray(below, np.float64)


@dataclass(frozen=True)
class Recorded:
    """Holds the hidden states of a reference model on some texts, kept on the host. evaluate takes it instead of the
    model, so a sweep runs the reference once. It has T x E values of the model's dtype."""

    model: Model  # without its layers
    protocol: Protocol
    ids: tuple[np.ndarray, ...]
    states: tuple[np.ndarray, ...]  # of each window [inputs, E]


def evaluate(
    model: Model,
    texts: Text | Sequence[Text],
    protocol: str | Protocol = "wikitext2-2048",
    *,
    reference: Model | Recorded | None = None,
    kv_cache: KVCache | None = None,
    max_slots: int = 8,
    max_step_tokens: int = 512,
    page_size: int = 16,
    backend: str | None = None,
    resume: str | Path | None = None,
) -> Evaluation:
    """Returns the perplexity of one or several texts. With a reference model it also has the divergence on the same
    tokens.

    Token ids are used unchanged, without BOS. Options are those of EngineOptions: a step has max_step_tokens of up to
    max_slots windows. The reference keeps K and V in its own dtype; use `record` for many evaluations against one.

    `resume` names a file that collects each window's scores. The same call continues from it after an interruption.
    Windows then share steps with other windows, so sums agree only up to rounding.

    Raises EvaluationError for texts that cannot be scored, and for a file of another evaluation. Raises ConfigError for
    bad options.
    """
    _check_options(max_slots, max_step_tokens, page_size, kv_cache, backend)
    texts, resolved = _as_texts(texts), find_protocol(protocol).resolve(model.config)
    readers = [Reader(model, kv_cache)]
    if reference is not None:
        known = reference.states if isinstance(reference, Recorded) else None
        other = reference.model if isinstance(reference, Recorded) else reference
        readers.append(Reader(other, states=known))
        resolved.resolve(other.config)
        _check_same_vocabulary(model, other, texts)
    ids, windows = _cut(model, texts, resolved)
    if isinstance(reference, Recorded):
        _check_recorded(reference, resolved, ids)
    sizes = Sizes.of(windows, max_slots, max_step_tokens, page_size)
    with contextlib.ExitStack() as stack:
        progress: Any = ()
        if resume is not None:
            key = _key(resolved, ids, readers, kv_cache, backend)
            progress = stack.enter_context(open_progress(resume, key))
        scores = score_windows(tuple(readers), ids, windows, sizes, backend, *progress)
    if resolved.joined:
        return Evaluation(resolved, tuple(_part(scores[i : i + 1], None) for i in range(len(windows))))
    groups: list[list[Scores]] = [[] for _ in ids]
    for window, score in zip(windows, scores, strict=True):
        groups[window.text].append(score)
    return Evaluation(resolved, tuple(_part(g, _words(t)) for g, t in zip(groups, texts, strict=True)))


def record(
    model: Model,
    texts: Text | Sequence[Text],
    protocol: str | Protocol = "wikitext2-2048",
    *,
    max_slots: int = 8,
    max_step_tokens: int = 512,
    page_size: int = 16,
    backend: str | None = None,
) -> Recorded:
    """Returns a reference for evaluate with the same protocol and texts. Raises the same errors as evaluate."""
    _check_options(max_slots, max_step_tokens, page_size, None, backend)
    resolved = find_protocol(protocol).resolve(model.config)
    ids, windows = _cut(model, _as_texts(texts), resolved)
    sizes = Sizes.of(windows, max_slots, max_step_tokens, page_size)
    states = read_states(Reader(model), ids, windows, sizes, backend)
    bare = replace(model, params=replace(model.params, layers=()))
    return Recorded(bare, resolved, tuple(ids), states)


def _key(
    protocol: Protocol, ids: list[np.ndarray], readers: list[Reader], kv_cache: KVCache | None, backend: str | None
) -> dict[str, Any]:
    """Returns the key of a resumable evaluation. Two evaluations with one key may share progress."""
    if not isinstance(kv_cache, str | None):
        raise EvaluationError("resume takes KV formats by name: leave it out with one of your own")
    models = [fingerprint(reader.model, reader.states) for reader in readers]
    how = {"protocol": asdict(protocol), "KV format": kv_cache, "backend": backend}
    return how | {"text": digest_of(ids), "models": models} | of_machine()


def _check_options(slots: int, tokens: int, page_size: int, kv_cache: KVCache | None, backend: str | None) -> None:
    EngineOptions(slots, page_size, max_step_tokens=tokens, kv_cache=kv_cache, backend=backend)  # checks them


def _check_recorded(recorded: Recorded, protocol: Protocol, ids: list[np.ndarray]) -> None:
    if recorded.protocol != protocol:
        a, b = (f"{p.name} (context {p.context}, stride {p.stride})" for p in (recorded.protocol, protocol))
        raise EvaluationError(f"the reference was recorded by protocol {a}, not by {b}")
    if len(recorded.ids) != len(ids) or not all(map(np.array_equal, recorded.ids, ids)):
        raise EvaluationError("the reference was recorded on other tokens than these")


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


def _cut(model: Model, texts: list[Text], protocol: Protocol) -> tuple[list[np.ndarray], list[Window]]:
    """Returns the token ids and windows of all texts."""
    ids = _encode_all(model, texts, protocol)
    windows = [window for i, tokens in enumerate(ids) for window in windows_of(len(tokens), protocol, i)]
    _check_windows(windows, ids, protocol)
    return ids, windows


def _check_windows(windows: list[Window], ids: list[np.ndarray], protocol: Protocol) -> None:
    for i in sorted(set(range(len(ids))) - {window.text for window in windows}):
        assert protocol.context is not None
        least = protocol.context + protocol.lead if protocol.last == "drop" else 2
        which = "the text" if len(ids) == 1 else f"text {i}"
        raise EvaluationError(f"protocol {protocol.name}: {which} has {len(ids[i])} tokens, a window takes {least}")


def _words(text: Text) -> int | None:
    return len(re.split(r"\s+", text)) if isinstance(text, str) else None  # as lm-eval counts words


def _part(scores: list[Scores], words: int | None) -> Part:
    """Returns exact sums, in any order."""

    def total(name: str) -> float:
        return math.fsum(x for s in scores for x in s[name])

    tokens = sum(len(s["nats"]) for s in scores)
    if "kl" not in scores[0]:
        return Part(tokens, words, total("nats"))
    return Part(tokens, words, total("nats"), total("reference_nats"), total("kl"), int(total("same")))
