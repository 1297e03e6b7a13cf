"""Predicts output lengths from the prompt, by a small network over statistics of its tokens. train_length_predictor.py
trains it on one model's own texts, and it is only valid for that model. A KV policy takes it as an object:

    Engine(model, kv_policy=Extent(load_learned("length.safetensors", model)))

The network sees hashed tokens (the count of each bucket, and the last tokens in order), the prompt's length, and the
request's stop strings. It gives a distribution over the output's length, in bins that grow with it. `levels` correct
its shares by held-out texts.
"""

import hashlib
import json
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.numpy

from jllm.engine.request import SamplingParams
from jllm.errors import JllmError

if TYPE_CHECKING:
    from jllm.model.model import Model

FORMAT = "jllm-length-predictor-1"
BAG, LAST, STOPS = 512, 256, 32  # hash buckets of tokens, of the last tokens, and of stop strings
PLACES = 4  # last tokens that count by their place
DENSE = 4  # numeric features
ARRAYS = ("edges", "bag", "last", "stops", "dense", "bias", "out", "out_bias", "levels")
REMEMBERED = 4096  # prompts


class LengthPredictorError(JllmError, ValueError):
    """A learned length predictor's file is damaged, or was made for another vocabulary or model."""


@dataclass(frozen=True)
class Features:
    """The network's view of a request: indices of rows of its tables, some with weights."""

    bag: np.ndarray  # i64[n] buckets of all different tokens
    counts: np.ndarray  # f32[n] log(1 + count), scaled to norm 1
    last: np.ndarray  # i64[PLACES] rows of a table of PLACES * LAST + 1; the last row if the prompt is too short
    stops: np.ndarray  # i64[k] buckets of the stop strings
    dense: np.ndarray  # f32[DENSE]


def features(prompt: Sequence[int], stop: Iterable[str]) -> Features:
    """Returns the features of a prompt (token ids) and its stop strings."""
    ids = np.asarray(prompt, np.int64)
    hashed = _hash(ids)
    bag, times = np.unique(hashed % BAG, return_counts=True)
    counts = np.log1p(times).astype(np.float32)
    counts /= max(1e-6, float(np.linalg.norm(counts)))
    last = np.full(PLACES, PLACES * LAST, np.int64)
    tail = hashed[::-1][:PLACES] % LAST
    last[: len(tail)] = tail + LAST * np.arange(len(tail))
    stops = np.array(sorted({zlib.crc32(text.encode()) % STOPS for text in stop}), np.int64)
    length = np.log1p(len(ids)) / 4
    return Features(bag, counts, last, stops, np.array([length, length**2, length**3, len(stops) > 0], np.float32))


def _hash(ids: np.ndarray) -> np.ndarray:
    """Returns Knuth's multiplicative hash, which separates neighbouring ids."""
    return (ids * 2654435761 % (1 << 32)) >> 16


class Learned:
    """A length.Predictor. `arrays` are those of ARRAYS:

    edges i64[B]: longest output of each bin, the last one open. The network is bag f32[BAG, W], last f32[PLACES * LAST
    + 1, W], stops f32[STOPS, W], dense f32[DENSE, W], bias f32[W], out f32[W, B] and out_bias f32[B]. levels f32[n]:
    the network's distribution function at true lengths of held-out texts, ascending.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._a = {name: np.asarray(arrays[name]) for name in ARRAYS}
        self.edges = self._a["edges"]
        self._edges = self.edges.astype(np.float64)
        self._known: OrderedDict[Any, np.ndarray] = OrderedDict()

    def distribution(self, prompt: Sequence[int], stop: Iterable[str] = ()) -> np.ndarray:
        """Returns P(output <= edges), f64[B], corrected; the last is 1."""
        a, x = self._a, features(prompt, stop)
        hidden = a["bias"] + x.dense @ a["dense"] + x.counts @ a["bag"][x.bag]
        hidden = hidden + a["last"][x.last].sum(0) + a["stops"][x.stops].sum(0)
        logits = (np.maximum(hidden, 0) @ a["out"] + a["out_bias"]).astype(np.float64)
        shares = np.exp(logits - logits.max())
        return corrected(np.cumsum(shares / shares.sum()), a["levels"])

    def predict(self, prompt: tuple[int, ...], params: SamplingParams, quantile: float, produced: int = 0) -> int:
        key = (prompt, params.stop)
        below = self._known.pop(key, None)
        if below is None:
            below = self.distribution(prompt, params.stop)
            if len(self._known) >= REMEMBERED:
                self._known.popitem(last=False)
        self._known[key] = below
        given = 1 - self._at(below, produced) if produced else 1.0
        length = self._quantile(below, 1 - (1 - quantile) * given)
        return int(min(max(length, produced + 1), params.max_new_tokens))

    def _at(self, below: np.ndarray, length: float) -> float:
        """Returns P(output <= length), linear within a bin."""
        return float(np.interp(length, np.concatenate([[0.0], self._edges]), np.concatenate([[0.0], below])))

    def _quantile(self, below: np.ndarray, share: float) -> float:
        """Returns the least length with at least this share of outputs up to it. Beyond the last closed bin it is
        infinite."""
        b = int(np.searchsorted(below, share - 1e-12))
        if b >= len(self._edges) - 1:
            return float("inf")
        left, start = (below[b - 1], self._edges[b - 1]) if b else (0.0, 0.0)
        part = (share - left) / (below[b] - left) if below[b] > left else 1.0
        return float(np.ceil(start + part * (self._edges[b] - start) - 1e-9))

    def observe(self, prompt: tuple[int, ...], params: SamplingParams, output: int, ended: bool) -> None:
        pass

    def alive(self, outputs: Iterable[int]) -> None:
        pass


def corrected(below: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Returns the share of held-out requests at whose true length the network's value was at most this."""
    if not len(levels):
        return below
    known = np.concatenate([[0.0], levels.astype(np.float64), [1.0]])
    return np.interp(below, known, np.arange(len(known)) / (len(known) - 1))


def fingerprint(model: "Model") -> str:
    """Returns a digest of a model's sizes and its last norm's weights. It does not depend on the storage of
    matrices."""
    c = model.config
    sizes = (c.architecture, c.vocab_size, c.hidden_size, c.intermediate_size, c.num_layers, c.num_heads)
    norm = np.asarray(model.params.norm).astype(np.float32).tobytes()
    return hashlib.sha256(repr(sizes).encode() + norm).hexdigest()[:16]


def save_learned(path: str | Path, arrays: Mapping[str, np.ndarray], model: "Model", about: Mapping[str, Any]) -> None:
    """Writes the predictor, with weights in float16 and the identity of its model. `about` is for readers. Raises
    LengthPredictorError."""
    whole = ("edges", "levels")
    stored = {
        name: np.ascontiguousarray(array if name in whole else np.asarray(array, np.float16))
        for name, array in arrays.items()
    }
    told = {
        "format": FORMAT,
        "vocab_size": str(model.config.vocab_size),
        "model": fingerprint(model),
        "about": json.dumps(about),
    }
    try:
        safetensors.numpy.save_file(stored, path, told)
    except (OSError, safetensors.SafetensorError) as error:
        raise LengthPredictorError(f"{path}: cannot be written: {error}") from None


def load_learned(path: str | Path, model: "Model") -> Learned:
    """Returns the predictor in a file. Raises LengthPredictorError for any other file, or another vocabulary or
    model."""
    try:
        with safetensors.safe_open(path, "numpy") as file:
            told = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise LengthPredictorError(f"{path}: cannot be read as a length predictor: {error}") from None
    if told.get("format") != FORMAT or set(arrays) != set(ARRAYS):
        raise LengthPredictorError(f"{path}: not a length predictor of format {FORMAT}")
    _check_shapes(path, arrays)
    if told.get("vocab_size") != str(model.config.vocab_size):
        raise LengthPredictorError(
            f"{path}: made for a vocabulary of {told.get('vocab_size')} tokens; this model has "
            f"{model.config.vocab_size}: train one for it (experiments.train_length_predictor)"
        )
    if told.get("model") != fingerprint(model):
        raise LengthPredictorError(
            f"{path}: made for another model of the same vocabulary size: train one for this one "
            "(experiments.train_length_predictor)"
        )
    return Learned({name: a if name == "edges" else a.astype(np.float32) for name, a in arrays.items()})


def _check_shapes(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    W, B, n = (arrays[name].size for name in ("bias", "edges", "levels"))
    want = {
        "edges": (B,), "bag": (BAG, W), "last": (PLACES * LAST + 1, W), "stops": (STOPS, W), "dense": (DENSE, W),
        "bias": (W,), "out": (W, B), "out_bias": (B,), "levels": (n,),
    }  # fmt: skip
    for name, shape in want.items():
        if arrays[name].shape != shape or 0 in (W, B):
            raise LengthPredictorError(f"{path}: {name} is of shape {list(arrays[name].shape)}, not {list(shape)}")
