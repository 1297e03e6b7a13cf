"""Keeps the values of a forward pass that requests ask for (Engine(taps=...)): which rows a step returns, and whose.

Index i of a sample's values is that of the row that read its token i. So the newest token has none. Each index comes
once, even if preemption or an update makes its row be computed again.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from jllm.errors import EvaluationError, RequestError
from jllm.model.taps import ROWS_OF_HEAD, resolve_taps
from jllm.programs.sizes import Limits
from jllm.step.buckets import Bucket
from jllm.step.state import Outputs

if TYPE_CHECKING:
    from jllm.engine.plan import StepPlan
    from jllm.engine.sequence import Sequence as Sample

Tokens = str | slice  # "last", "all", or the indices of tokens
Place = tuple[int, range | None]  # where a sample's rows begin among a step's, and their indices; None: it decodes


@dataclass(frozen=True)
class Asked:
    """Holds what a request asks for: names of values, and the tokens whose values it takes."""

    names: tuple[str, ...]
    tokens: Tokens

    def begin(self, prompt: int) -> "Tapped":
        """Returns the record of a sample with a prompt of so many tokens. "last" is the rows that draw a token."""
        if isinstance(self.tokens, slice):
            start, stop, step = self.tokens.start or 0, self.tokens.stop, self.tokens.step or 1
        else:
            start, stop, step = (prompt - 1 if self.tokens == "last" else 0), None, 1
        return Tapped(self.names, stop, step, start)


@dataclass(eq=False)
class Tapped:
    """Holds the values that a sample has so far."""

    names: tuple[str, ...]
    stop: int | None  # the index after the last one wanted; None: as many as come
    step: int
    next: int  # the first index that is wanted and not there
    taken: list[dict[str, np.ndarray]] = field(default_factory=list)  # values [n, ...] by name, in order

    def copy(self) -> "Tapped":
        """Returns the record of a fork."""
        return replace(self, taken=list(self.taken))

    def wanted(self, begin: int, end: int) -> range:
        """Returns the indices that are wanted of those from begin up to end."""
        first = self.next + max(0, -(-(begin - self.next) // self.step)) * self.step
        return range(first, end if self.stop is None else min(end, self.stop), self.step)

    def take(self, outputs: Outputs, rows: Sequence[int], indices: Sequence[int]) -> None:
        """Takes in the rows of a step's values that are wanted and not there. Row i has this index."""
        wanted = self.wanted(indices[0], indices[-1] + 1) if indices else range(0)
        chosen = [row for row, index in zip(rows, indices) if index in wanted]
        if chosen:
            self.taken.append({name: np.asarray(outputs.taps[name])[chosen] for name in self.names})
            self.next = wanted[-1] + self.step

    def values(self) -> dict[str, np.ndarray]:
        """Returns all values [n, ...] by name, or none if no row was wanted."""
        if not self.taken:
            return {}
        return {name: np.concatenate([each[name] for each in self.taken]) for name in self.names}


def read_asked(taps: Any, tokens: Tokens, samples: int, declared: Collection[str], limits: Limits) -> Asked | None:
    """Returns what a request of so many samples asks for. `declared` are the engine's taps. Raises RequestError for
    names that it lacks, for wrong tokens, and for more rows a step than its budget."""
    if isinstance(taps, Asked):
        return taps
    if not taps:
        if tokens != "last":
            raise RequestError(f"tokens={tokens!r} has no meaning without taps: name the values")
        return None
    if not declared:
        raise RequestError("taps are not kept here: declare their names at the engine (Engine(taps=...))")
    listed = isinstance(taps, Collection) and not isinstance(taps, str)
    if not listed or not all(isinstance(name, str) for name in taps):
        raise RequestError(f"taps must be a list of names, not {taps!r}")
    try:
        names = tuple(name for name in resolve_taps(tuple(taps), 1 + _last_layer(declared)) if name in declared)
    except EvaluationError as error:
        raise RequestError(f"taps: {error}") from None
    if not names:
        raise RequestError(f"taps: the engine keeps none of {', '.join(taps)}, but {', '.join(declared)}")
    if isinstance(tokens, slice):
        ends = [x for x in (tokens.start, tokens.stop, tokens.step) if x is not None]
        good = all(isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= 0 for x in ends)
        good = good and tokens.step != 0
    else:
        good = tokens in ("last", "all")
    if not good:
        raise RequestError(f'tokens must be "last", "all" or a slice of indices from 0 up, not {tokens!r}')
    if tokens != "last" and (heads := [name for name in names if name in ROWS_OF_HEAD]):
        raise RequestError(f'taps: {heads[0]} is computed where a token is drawn: take it with tokens="last"')
    most = limits.tap_rows or 0
    if samples * limits.short_rows > most:
        what = f"{samples} samples of {limits.short_rows} rows" if limits.short_rows > 1 else f"{samples} samples"
        raise RequestError(f"taps: {what} have more rows in a step than the engine's budget, tap_rows={most}")
    return Asked(names, tokens)


def _last_layer(declared: Collection[str]) -> int:
    return max((int(name.split(".")[1]) for name in declared if name.startswith("layers.")), default=0)


def rows_of(plan: "StepPlan", bucket: Bucket) -> tuple[list[int], dict["Sample", Place]]:
    """Returns the rows of a step whose values are wanted, and where each sample's are among them."""
    rows: list[int] = []
    places: dict[Sample, Place] = {}
    for at, (seq, count) in enumerate(zip(plan.decodes, plan.rows)):
        if seq.taps is not None and (seq.taps.stop is None or seq.computed - 1 < seq.taps.stop):
            places[seq] = len(rows), None
            rows += range(at * bucket.rows, at * bucket.rows + min(count, bucket.rows))
    first = bucket.decodes * bucket.rows
    for chunk in plan.chunks:
        if chunk.seq.taps is not None:
            wanted = chunk.seq.taps.wanted(chunk.start, chunk.start + len(chunk.tokens))
            places[chunk.seq] = len(rows), wanted
            rows += [first + index - chunk.start for index in wanted]
        first += len(chunk.tokens)
    return rows, places


def take_prompts(places: dict["Sample", Place], outputs: Outputs) -> None:
    """Takes in the values of a step's prompt tokens. `outputs` are on the host."""
    for seq, (at, indices) in places.items():
        if indices is not None and seq.taps is not None and seq.live:
            seq.taps.take(outputs, range(at, at + len(indices)), indices)


def take_drawn(seq: "Sample", first: int, outputs: Outputs, segment: int, kept: int) -> None:
    """Takes in the values of the rows at which a decode drew the tokens that count, not those of rejected drafts.
    `segment` is its number in the step, and `first` its first row among the tapped ones. The tokens are not yet those
    of `seq`."""
    assert seq.taps is not None
    nodes = range(kept) if outputs.nodes is None else outputs.nodes[segment, :kept].tolist()
    newest = seq.length - 1
    seq.taps.take(outputs, [first + node for node in nodes], range(newest, newest + kept))
