"""Computes the least time of a step on a device: bytes at its bandwidth, operations at its peaks (devices.py).

A step has one matmul per matrix, on its decoding rows and prompts together. It has two attention kernels, one for each.
A matmul counts with the larger of its weight's bytes over the bandwidth and its operations over their peak. Of a
mixture, it has the bytes of the experts that rows touch, and the operations of those that they choose. Inputs and
outputs stay in the L2 cache. Decoding rows' attention counts with the bytes of their K and V, each read once. Prompts'
attention counts with those, or with its operations if they take longer. Kernels run one after the other, so all this is
summed, as if nothing else cost anything.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from experiments.steps.devices import Ceilings
from jllm.config import Experts, LlamaConfig
from jllm.engine.plan import StepPlan
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence as Sample
from jllm.model.cache import cache_bytes, make_cache, parse_kv_cache
from jllm.model.model import Model
from jllm.model.params import Params, linears, tree_bytes
from jllm.model.shards import whole_params
from jllm.parallel.mesh import ranks_of
from jllm.programs.sizes import Limits
from pallas_kernels.formats.quantized_weights import QuantizedWeight


@dataclass(frozen=True)
class Matrix:
    """A matmul's weight [outputs, inputs]: its bytes with scales, and the operations/s of its kind. Of `experts` such
    weights, a row meets `chosen`. `read` is how many all rows met, if that was counted."""

    nbytes: int
    outputs: int
    inputs: int
    peak: float
    experts: int = 1
    chosen: int = 1
    read: float | None = None

    def seconds(self, rows: int, bandwidth: float) -> float:
        operations = 2 * rows * self.chosen * self.inputs * self.outputs
        return max(self.touched(rows) * self.nbytes / bandwidth, operations / self.peak)

    def touched(self, rows: int) -> float:
        """Returns how many of the weights are read. Where nothing was counted, each row's are drawn evenly and apart
        from other rows'."""
        if self.read is not None:
            return self.read
        return self.experts * (1 - (1 - self.chosen / self.experts) ** rows) if self.experts > 1 else 1


@dataclass(frozen=True)
class Work:
    """The work of one step."""

    decodes: int
    tokens: int  # of prompts
    rows: int  # that the head runs on
    keys: float  # whose K and V decoding rows read
    prompt_keys: int = 0  # whose K and V prompts read
    pairs: float = 0.0  # prompt queries times the keys that each sees


@dataclass(frozen=True)
class Floor:
    """The floor of one model on one device, or on the devices of a mesh."""

    linears: tuple[tuple[Matrix, int], ...]  # each different matrix of the layers, and its count
    head: Matrix
    attention: int  # operations for one query on one key, all layers and heads
    bandwidth: float  # bytes/s
    attention_peak: float  # operations/s
    layers: int = 1

    def parts(self, work: Work, token_bytes: float, computed: int | None = None) -> tuple[float, float]:
        """Returns the seconds of a step's matmuls and of its attention. K and V have `token_bytes` per token.
        `computed` is the rows of matmuls, if they differ from the tokens."""
        rows = work.decodes + work.tokens if computed is None else computed
        products = sum(count * matrix.seconds(rows, self.bandwidth) for matrix, count in self.linears)
        prompts = max(
            work.prompt_keys * token_bytes / self.bandwidth, work.pairs * self.attention / self.attention_peak
        )
        decodes = work.keys * token_bytes / self.bandwidth
        return products + self.head.seconds(work.rows, self.bandwidth), decodes + prompts

    def of(self, work: Work, token_bytes: float) -> float:
        """Returns the seconds of the whole step: its parts added up."""
        return sum(self.parts(work, token_bytes))


def with_read(floor: Floor, experts: float) -> Floor:
    """Returns the floor of steps that read so many experts of a layer."""
    linears = tuple((replace(w, read=experts) if w.experts > 1 else w, count) for w, count in floor.linears)
    return replace(floor, linears=linears)


def make_floor(params: Params, config: LlamaConfig, ceilings: Ceilings, devices: int | None = None) -> Floor:
    """Returns the floor of these weights on a device with these ceilings. Shapes (jax.eval_shape) are enough. On a
    mesh, or on `devices`, it is that of the whole weights, with the devices' sum. Raises KeyError for weights whose
    arithmetic the device lacks."""
    n, apart = (
        devices or ranks_of(config),
        jax.eval_shape(lambda given: replace(given, layers=tuple(given.layers)), params),
    )
    params = whole_params(apart, config)
    peaks = {kind: n * peak for kind, peak in ceilings.peaks.items()}
    layers = (matrix(w, peaks, config.experts if ".experts." in name else None) for name, w in linears(params).items())
    head = matrix(params.embed if params.head is None else params.head, peaks)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    each = tuple(Counter(layers).items())
    return Floor(each, head, attention, n * ceilings.bandwidth, n * ceilings.attention, config.num_layers)


def make_floors(
    params: Params, config: LlamaConfig, ceilings: Ceilings, devices: int | None = None
) -> dict[str, Floor]:
    """Returns the "floor" of make_floor, and a "sustained" one at rates that hold for seconds, if these are known."""
    rates = {"floor": ceilings, "sustained": ceilings.sustained}
    return {name: make_floor(params, config, each, devices) for name, each in rates.items() if each is not None}


def matrix(weight: Any, peaks: Mapping[str | None, float], experts: Experts | None = None) -> Matrix:
    """Returns what counts of a weight, or of one expert's where it has those of all."""
    activations = weight.format.row_codes if isinstance(weight, QuantizedWeight) else None
    (outputs, inputs), X = weight.shape, experts.count if experts else 1
    each = (X, experts.chosen) if experts else (1, 1)
    return Matrix(tree_bytes(weight) // X, outputs // X, inputs, peaks[activations], *each)


def token_bytes(model: Model, kv_cache: str | None) -> float:
    """Returns the bytes of one token's K and V, all layers."""
    formats = parse_kv_cache(kv_cache, model.config, model.params.dtype)
    return cache_bytes(jax.eval_shape(lambda: make_cache(model.config, 1, 16, formats))) / 16


def step_work(decodes: int, keys: float, chunks: Iterable[tuple[int, int, bool]] = ()) -> Work:
    """Returns the work of a step with chunks (start, tokens, final). Its decoding rows see `keys` keys in all. A chunk
    also reads the keys of earlier chunks. The head runs only on a prompt's last token."""
    chunks = list(chunks)
    return Work(
        decodes,
        sum(n for _, n, _ in chunks),
        decodes + sum(final for *_, final in chunks),
        keys,
        sum(start + n for start, n, _ in chunks),
        sum(n * (start + (n + 1) / 2) for start, n, _ in chunks),
    )


def work_of(plan: StepPlan) -> Work:
    """Returns the work of a step that was just planned. Its sequences already count its tokens."""
    keys = sum([seq.computed for seq in plan.decodes])
    return step_work(len(plan.decodes), keys, ((c.start, len(c.tokens), c.final) for c in plan.chunks))


def schedule(lengths: Sequence[tuple[int, int]], limits: Limits) -> Iterator[Work]:
    """Yields the merge schedule of requests [prompt, output] that are all there from the start, read one step late."""
    scheduler = Scheduler(limits)
    for i, (prompt, output) in enumerate(lengths):
        scheduler.add(Sample(i, 0, (1,) * prompt, SamplingParams(), 0, prompt + output))
    before = None
    while not scheduler.idle:
        plan = scheduler.schedule()
        if plan is not None:
            yield work_of(plan)
        if before is not None:
            for seq in [*before.decodes, *(c.seq for c in before.chunks if c.final)]:
                scheduler.on_tokens(seq, [1])
                if not seq.finished and seq.length == seq.max_length:
                    scheduler.finish(seq, "length")
            scheduler.step_read(before.step)
        before = plan


def workload_seconds(
    lengths: Sequence[tuple[int, int]], limits: Limits, floors: Sequence[Floor], token_bytes: float
) -> list[float]:
    """Returns each floor of a workload sent at once, with `token_bytes` of KV per token."""
    found = [0.0] * len(floors)
    for work in schedule(lengths, limits):
        found = [seconds + floor.of(work, token_bytes) for seconds, floor in zip(found, floors)]
    return found
