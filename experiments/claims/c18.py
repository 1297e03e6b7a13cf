"""Tests C18: the four fusions one by one vs. the unfused model, by milliseconds per step and kernels per layer.

LLaMA-2-7B's decoder layers in bfloat16 over the paged cache are built from the library's operations (unfused.py). They
run with no fusion, with each alone, with all but each, and with all. The fusions are residual sum with norm; q, k, v
and gate, up as one matmul each; rotary embedding with the write of K and V; flash attention. Barriers separate what is
not fused. SiLU and its product are always one kernel.

Two depths are timed, calls in a row by the host's clock. A layer's difference gives the 32 layers. Kernels are counted
alike, in the compiled program. All run in turn, round after round, with a row each. A change is computed within a
round.
"""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from experiments.claims.claim import Answer, Claim, Interval, Row, change_of, in_all, in_most, percents
from experiments.claims.shapes import config_of, random_params
from experiments.claims.unfused import NAMES, Fusions, layers, split
from jllm.config import LlamaConfig
from jllm.model.cache import make_cache, parse_kv_cache
from jllm.model.paged import Chunks, Paged, ShortSegments, no_chunks, no_segments, paged_batch
from pallas_kernels.formats.kv_pages import KVPages

CASES = (("decode", 64, 1024), ("prefill", 1, 2048))  # phase, sequences, tokens of each
TOY_CASES = (("decode", 2, 20), ("prefill", 1, 24))
BUT = "all but "
VARIANTS = {
    "none": Fusions(),
    **{name: Fusions(**{name: True}) for name in NAMES},
    **{BUT + name: Fusions(**{each: each != name for each in NAMES}) for name in NAMES},
    "all": Fusions(*[True] * 4),
}
DEPTHS = (1, 3)
PAGE = 16
CALLS, ROUNDS = 20, 5
NOISE = 0.02  # share of a step: a smaller change of a single round is noise, as in older files
AGREE = 3e-2  # relative norm: sums in bfloat16 may differ by this with their order
FREE = {  # launch nothing
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "optimization-barrier", "call",
    "while", "conditional", "after-all", "copy-done", "partition-id", "iota",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The compiled layers of one depth, with their inputs."""

    compiled: Any
    params: Any
    x: jax.Array
    batch: Paged
    config: LlamaConfig

    def time(self) -> tuple[float, jax.Array]:
        """Returns the microseconds of a call, after a warm-up, and the last result."""
        cache = cache_of(len(self.params), self.x, self.batch, self.config)
        out, cache = self.compiled(self.params, self.x, self.batch, cache)
        jax.block_until_ready((out, cache))
        start = time.perf_counter()
        for _ in range(CALLS):
            out, cache = self.compiled(self.params, self.x, self.batch, cache)
        jax.block_until_ready(out)
        return 1e6 * (time.perf_counter() - start) / CALLS, out


def measure(toy: bool) -> Iterator[Row]:
    config = config_of(toy)
    deep = LlamaConfig(**{**vars(config), "num_layers": max(DEPTHS), "windows": ()})
    params = random_params(deep, toy)
    both = tuple((layer, split(layer, deep)) for layer in params.layers)
    for phase, sequences, tokens in TOY_CASES if toy else CASES:
        x, batch = inputs(deep, phase, sequences, tokens, params.dtype)
        jobs = [(name, depth) for name in VARIANTS for depth in DEPTHS]
        lowered = [lower(both[:depth], x, batch, deep, VARIANTS[name]) for name, depth in jobs]
        with ThreadPoolExecutor(8) as pool:
            compiled = list(pool.map(lambda each: each.compile(), lowered))
        runs = {job: Run(c, both[: job[1]], x, batch, deep) for job, c in zip(jobs, compiled)}
        plain = None
        for at, name in product(range(ROUNDS), VARIANTS):
            row, out = variant_row(name, [runs[name, depth] for depth in DEPTHS], config)
            plain = out if plain is None else plain
            row = {"phase": phase, "sequences": sequences, "tokens": tokens, "round": at} | row
            off = float(jnp.linalg.norm(out - plain) / jnp.linalg.norm(plain))
            yield row if off < AGREE else row | {"error": f"the results are {off:.1e} of their norm apart"}


def variant_row(name: str, runs: list[Run], config: LlamaConfig) -> tuple[Row, jax.Array]:
    times, outs = zip(*(run.time() for run in runs))
    counts = [kernels(run.compiled.as_text()) for run in runs]
    step = DEPTHS[1] - DEPTHS[0]
    layer = (times[1] - times[0]) / step
    row = {
        "fused": name, "kernels": round((counts[1] - counts[0]) / step, 1), "layer_us": round(layer, 1),
        "step_ms": round((times[0] + layer * (config.num_layers - DEPTHS[0])) / 1e3, 3),
    }  # fmt: skip
    return row, outs[1].astype(jnp.float32)


def lower(params: Any, x: jax.Array, batch: Paged, config: LlamaConfig, fusions: Fusions) -> jax.stages.Lowered:
    run = jax.jit(partial(layers, config=config, fusions=fusions), donate_argnums=3)
    cache = jax.eval_shape(lambda: cache_of(len(params), x, batch, config))
    return run.lower(params, x, batch, cache)


def cache_of(depth: int, x: jax.Array, batch: Paged, config: LlamaConfig) -> KVPages:
    """Returns an empty cache of `depth` layers."""
    of_depth = LlamaConfig(**{**vars(config), "num_layers": depth, "windows": ()})
    return make_cache(of_depth, pages_of(batch), PAGE, parse_kv_cache(None, config, x.dtype))


def pages_of(batch: Paged) -> int:
    """Returns the number of pages in its tables."""
    return batch.decode_pages.size + batch.chunk_pages.size


def inputs(config: LlamaConfig, phase: str, sequences: int, tokens: int, dtype) -> tuple[jax.Array, Paged]:
    """Returns one new token for each sequence, whose K and V have `tokens` with it, or one whole prompt."""
    each = -(-tokens // PAGE)
    table = jnp.arange(sequences * each, dtype=jnp.int32).reshape(sequences, each)
    rows = sequences if phase == "decode" else tokens
    ids, ones = jnp.zeros(rows, jnp.int32), jnp.ones(sequences, jnp.int32)
    if phase == "decode":
        parts = ShortSegments(ids[:, None], (tokens - 1) * ones, ones, table), no_chunks(each)
    else:
        parts = no_segments(each), Chunks(ids, 0 * ones, tokens * ones, table)
    batch = paged_batch(*parts, num_pages=sequences * each, page_size=PAGE)
    return jax.random.normal(jax.random.key(1), (rows, config.hidden_size), dtype), batch


def kernels(text: str) -> int:
    """Returns the number of kernels that a compiled program launches, in its entry and in what that calls."""
    bodies: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if match := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = match.group(2)
            entry = name if match.group(1) else entry
            bodies[name] = []
        elif name and " = " in line:
            bodies[name].append(line)

    def count(name: str) -> int:
        total = 0
        for line in bodies.get(name, ()):
            match = re.search(r" = (?:\([^=]*?\)|\S+) ([a-z][\w\-]*)\(", line)
            opcode = match.group(1) if match else ""
            total += bool(opcode) and opcode not in FREE
            if opcode in ("call", "while") and (target := re.search(r"(?:to_apply|body)=%?([\w.\-]+)", line)):
                total += count(target.group(1))
        return total

    return count(entry)


def cases_of(rows: list[Row]) -> dict[tuple[str, int, int], dict[str, list[Row]]]:
    """Returns the rows by case and fusions, one per round. Cases without the unfused model are left out."""
    found: dict[tuple[str, int, int], dict[str, list[Row]]] = {}
    for row in rows:
        by = found.setdefault((row["phase"], row["sequences"], row["tokens"]), {})
        by.setdefault(row["fused"], []).append(row)
    return {case: by for case, by in found.items() if "none" in by}


def saved(rows: list[Row]) -> dict[str, list[Interval]]:
    """Returns how much longer a step is with a fusion, by case: for each alone, each as the last, and "all"."""
    found: dict[str, list[Interval]] = {}
    for by in cases_of(rows).values():
        for name in [name for name in by if name != "none"]:
            last = name.startswith(BUT) and "all" in by
            ours, over = (by["all"], by[name]) if last else (by[name], by["none"])
            change = change_of(ours, over, "step_ms", NOISE)
            if change is not None:  # None: it failed in every round of the other
                found.setdefault(name.removeprefix(BUT) if last else name, []).append(change)
    return found


def shorter(change: Interval) -> bool | None:
    longer = change.reaches(0.0)
    return None if longer is None else not longer


def singly(rows: list[Row]) -> list[bool | None]:
    return [shorter(change) for name, changes in saved(rows).items() if name != "all" for change in changes]


def holds(rows: list[Row]) -> Answer:
    """Decides by all four fusions together. The size also needs each fusion, alone and as the last."""
    return in_most(map(shorter, saved(rows).get("all", []))), in_all(singly(rows))


def words(rows: list[Row]) -> tuple[str, str]:
    together, sides = percents((change.mean for change in saved(rows)["all"]), "{:+.0f}"), singly(rows)
    good = f"{sum(side is True for side in sides)} of {len(sides)}"
    line = f"The four fusions change a step's time by {together}; {good} single changes make it shorter."
    return f"all {together}; {good} single changes save time", line


CLAIM = Claim(
    id="C18",
    stated="each of the four fusions saves time",
    measure=measure,
    holds=holds,
    words=words,
)
