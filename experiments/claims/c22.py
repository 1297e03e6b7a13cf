"""Tests C22: a KV cache vs. recomputation, and flash vs. naive attention, by time and memory over length.

Cache: rows have the cost of the next token of a LLaMA-2-7B sequence in bfloat16. It is a decode step over the pages, or
a forward pass over all tokens so far. Steps of one and of three layers are timed; a layer's difference gives the 32.
Memory is what a step needs beside the weights: K and V of all layers, or of the current one, and temporary arrays.

Attention: one causal sequence runs through the library's kernel over pages, or through a softmax over all scores in
XLA.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.c5 import NOISE
from experiments.claims.claim import Answer, Claim, Row, in_all, in_most, microseconds, spread
from experiments.steps.timer import StepTimer, page_bytes, pool_for, step_of
from jllm.config import LlamaConfig
from jllm.files.hf_config import load_config
from jllm.model.param_specs import init_params
from jllm.model.params import Params
from pallas_kernels.formats.kv_pages import gather
from pallas_kernels.prefill_attention import plan, prefill_attention
from pallas_kernels.prefill_attention.bench import inputs
from pallas_kernels.prefill_attention.cases import Case

CONFIG = Path(__file__).parents[2] / "configs" / "llama-2-7b.json"
MIB = 1 << 20
PAGE = 16
DEPTHS = (1, 3)  # layers of the timed steps
LEAST = 1.1  # least speed-up that counts
AGREE = 2e-2  # relative norm: sums in bfloat16 may differ by this with their order


def measure(toy: bool) -> Iterator[Row]:
    config = load_config(CONFIG)
    if toy:
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 4}
        config = replace(config, **sizes, head_dim=16, vocab_size=256)
    shape = (2, 64) if toy else (config.num_heads, config.head_dim)
    lengths = (64, 256) if toy else (2048, 8192, 16384)
    of_cache = (16, 64) if toy else (1024, 8192)
    params = init_params(replace(config, num_layers=max(DEPTHS)), jax.random.key(0), jnp.bfloat16)
    jobs = list(product(of_cache, (True, False), DEPTHS))
    with ThreadPoolExecutor(8) as pool:  # compiling takes most of the time, and ends before timing starts
        contests = pool.map(lambda length: Contest(length, *shape), lengths)
        steps = dict(zip(jobs, pool.map(lambda job: Step(params, config, *job), jobs)))
    for contest in contests:
        yield contest.row()
    for length in of_cache:
        yield cache_row(config, length, steps)


def cache_row(config: LlamaConfig, length: int, steps: dict[tuple[int, bool, int], "Step"]) -> Row:
    row: Row = {"part": "cache", "tokens": length}
    for name, cached in (("cached", True), ("recomputed", False)):
        first, second = (steps[length, cached, depth] for depth in DEPTHS)
        us = [step.microseconds() for step in (first, second)]
        if us[1] <= us[0]:
            return row | {"error": f"{name}: three layers took no longer than one ({us[1]:.0f} and {us[0]:.0f} us)"}
        layer = (us[1] - us[0]) / (DEPTHS[1] - DEPTHS[0])
        kept = second.layer_bytes * (config.num_layers if cached else 1)
        row[f"{name}_ms"] = round((us[0] + layer * (config.num_layers - DEPTHS[0])) / 1e3, 3)
        row[f"{name}_mib"] = round((kept + second.temporary_bytes) / MIB, 1)
    return row | {"times": round(row["recomputed_ms"] / row["cached_ms"], 2)}


class Step:
    """One compiled step that yields the next token of a sequence of `length`, with `depth` layers."""

    def __init__(self, params: Params, config: LlamaConfig, length: int, cached: bool, depth: int):
        config = replace(config, num_layers=depth)
        pool = pool_for(1, length + 64, PAGE, "bf16")  # the timed steps continue the sequence
        self.timer = StepTimer(replace(params, layers=params.layers[:depth]), config, pool)
        self.context = length - 1
        layout, self.buffer = step_of("decode" if cached else "prefill", 1, length)
        self.compiled = self.timer.lower(layout).compile()
        self.layer_bytes = page_bytes(config, params.dtype, PAGE, "bf16") * length // (PAGE * depth)
        self.temporary_bytes = temporary_bytes(self.compiled)

    def microseconds(self) -> float:
        call = self.timer.repeated(self.compiled, self.buffer, self.context)
        us = microseconds(call)
        if int(np.max(call())) < 0:
            raise AssertionError("the step made no token")
        self.timer.state = None
        return us


def temporary_bytes(compiled: Any) -> int:
    """Returns the bytes of arrays that live only while it runs."""
    return compiled.memory_analysis().temp_size_in_bytes


def naive(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    """Returns causal attention of q, k, v [L, H, D] by a softmax over all scores [H, L, L]."""
    scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) * scale
    row = jnp.arange(q.shape[0], dtype=jnp.int32)
    p = jax.nn.softmax(jnp.where((row[None, :] <= row[:, None])[None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", p.astype(q.dtype), v)


class Contest:
    """Compiled flash and naive attention of one causal sequence."""

    def __init__(self, length: int, heads: int, dim: int):
        case = Case(
            q_lens=(length,), kv_lens=(length,), unused=0, heads=(heads, heads), head_dim=dim, page_size=PAGE,
            k_format="bf16", v_format="bf16", dtype="bfloat16",
        )  # fmt: skip
        self.size: Row = {"part": "attention", "tokens": length, "H": heads, "D": dim}
        flash = jax.jit(inputs, static_argnums=(0, 1))(case, 0)
        q, pages, table, cu_q_lens, kv_lens = flash
        work = plan(q, pages, cu_q_lens, kv_lens, scale=case.scale)
        k, v = (gather(pool, table, q.dtype)[0].swapaxes(0, 1)[:length] for pool in (pages.k, pages.v))
        self.arguments: dict[str, tuple[Any, ...]] = {"flash": flash, "naive": (q, k, v)}
        attend: dict[str, Callable[..., jax.Array]] = {
            "flash": partial(prefill_attention, scale=case.scale, work=work), "naive": partial(naive, scale=case.scale),
        }  # fmt: skip
        self.compiled = {name: jax.jit(attend[name]).lower(*self.arguments[name]).compile() for name in attend}

    def row(self) -> Row:
        row, outs = self.size, []
        for name, compiled in self.compiled.items():
            us = microseconds(partial(compiled, *self.arguments[name]))
            row |= {f"{name}_us": round(us, 1), f"{name}_mib": round(temporary_bytes(compiled) / MIB, 1)}
            outs.append(compiled(*self.arguments[name]).astype(jnp.float32))
        apart = float(jnp.linalg.norm(outs[0] - outs[1]) / jnp.linalg.norm(outs[1]))
        if not apart < AGREE:
            return row | {"error": f"the results are {apart:.1e} of their norm apart"}
        return row | {"times": round(row["naive_us"] / row["flash_us"], 2)}


def gains(rows: list[Row], part: str) -> list[float]:
    """Returns the speed-ups by length, from the least length on."""
    found = [row for row in rows if row["part"] == part]
    return [row["times"] for row in sorted(found, key=lambda row: row["tokens"])]


def holds(rows: list[Row]) -> Answer:
    """Decides case by case. A speed-up of LEAST counts, and flash attention must not take more memory. The speed-up
    must grow with length; two lengths within noise leave that open."""
    helps = [row["times"] >= LEAST and row.get("flash_mib", 0) <= row.get("naive_mib", 0) for row in rows]
    longer = [pair for part in ("cache", "attention") for pair in pairwise(gains(rows, part))]
    return in_most(helps), in_all(None if abs(b / a - 1) <= 4 * NOISE else b > a for a, b in longer)


def words(rows: list[Row]) -> tuple[str, str]:
    cache, flash = (f"{spread(gains(rows, part), '{:.1f}')} times" for part in ("cache", "attention"))
    line = f"A KV cache makes tokens {cache} as fast; flash attention is {flash} as fast."
    return f"cache {cache}, flash {flash} as fast", line


CLAIM = Claim(
    id="C22",
    stated="less time, the more so by length",
    measure=measure,
    holds=holds,
    words=words,
)
