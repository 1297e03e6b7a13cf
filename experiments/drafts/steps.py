"""Measures the cost of verifying drafts: steps of Q rows per sequence vs. plain ones, by batch and context. It derives
how often drafts must be accepted. Weights are random and acceptance is imposed, so every row is simulated."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.arguments import config_of
from experiments.drafts.imposed import VerifyingTimer, imposed, verifying_step
from experiments.result_file import bar
from experiments.steps.timer import StepTimer, compile_ahead, pool_for, random_params, step_of, stopwatch
from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.model.params import Params
from jllm.programs.compiler import Recipe
from jllm.quant.quantize import quantize
from jllm.speculative.quantized_copy import QuantizedCopy
from jllm.speculative.tree import MOST_NODES, chain

Row = dict[str, Any]
BARS = {(1, 136): 1.10, (16, 136): 1.10, (64, 136): 1.45, (64, 1024): 1.20}  # (batch, context): for Q = 4, in bf16
LIKELY = 0.9  # acceptance of each draft of a copy, as an example
ACCEPTED, LEAST_TIMES = 3, 2.5  # imposed tokens per step, and the speed-up they must give at batch 1


def break_even(tokens: float, drafts: int) -> float | None:
    """Returns the acceptance per draft of a chain that gives this many tokens per step: 1 + a + a^2 + ... = tokens. A
    draft counts only if all before it were accepted. Returns None if all drafts together are too few."""
    if tokens > 1 + drafts:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(drafts + 1)) < tokens else (low, middle)
    return round((low + high) / 2, 4)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    if not all(2 <= q <= MOST_NODES for q in args.rows):
        raise ConfigError(f"--rows {' '.join(map(str, args.rows))}: each must be from 2 to {MOST_NODES}")
    config, note = config_of(args, slot_tokens(max(args.context), args)), stopwatch()
    params = random_params(config, args.dtype)
    for context in args.context:
        for batch in args.batch:
            yield from timed(params, config, batch, context, args)
            note(f"batch {batch}, context {context}")


def slot_tokens(context: int, args: argparse.Namespace) -> int:
    """Returns the most tokens of a sequence after all steps."""
    return context + args.steps * (ACCEPTED + 1) + max(args.rows)


def timed(params: Params, config: LlamaConfig, batch: int, context: int, args: argparse.Namespace) -> Iterator[Row]:
    """Yields steps of a batch at a context. The first is a plain step. Next come steps of each Q in which no draft is
    accepted, so that all see the same lengths. Then come steps with the imposed acceptance, and steps that draft with
    copies of the model too."""
    pool = pool_for(batch, slot_tokens(context, args), args.page_size, args.kv_cache)
    plain = StepTimer(params, config, pool, args.backend)
    timers = {
        q: VerifyingTimer(params, config, pool, args.backend, drafter=imposed(chain(q - 1), 0)) for q in args.rows
    }
    copies = {
        (scheme, q): VerifyingTimer(params, config, pool, args.backend, drafter=QuantizedCopy(copy, chain(q - 1)))
        for scheme in args.copies
        for copy in [quantize(params, scheme)]
        for q in args.rows
    }
    recipes: dict[Any, Recipe] = {1: plain.recipe(step_of("decode", batch)[0])}
    recipes |= {q: timer.recipe(verifying_step(batch, chain(q - 1))[0]) for q, timer in timers.items()}
    recipes |= {key: timer.recipe(verifying_step(batch, chain(key[1] - 1))[0]) for key, timer in copies.items()}
    steps = compile_ahead(recipes, args.threads)

    def milliseconds(timer: StepTimer, q: int, tokens: int, scheme: str | None = None) -> float:
        _, buffer = step_of("decode", batch) if q == 1 else verifying_step(batch, chain(q - 1))
        timer.renew()
        timer.place(context)
        step = steps[q if scheme is None else (scheme, q)].result()
        seconds = timer.one(step, buffer, tokens * batch, args.steps, args.repeats)
        timer.state = None
        return 1e3 * seconds

    about: Row = {"simulated": True, "batch": batch, "context": context}
    try:
        base = milliseconds(plain, 1, 1)
    except Exception as error:  # a compiler or kernel may raise anything; other sizes go on
        yield about | failure(error)
        return
    yield about | {"Q": 1, "step_ms": round(base, 4), "tokens_s": round(1e3 * batch / base, 1)}
    for q, timer in timers.items():
        about["Q"] = q
        try:
            ms = milliseconds(timer, q, 1)
            row = about | {"step_ms": round(ms, 4), "over_plain": round(ms / base, 4)}
            yield row | {"break_even_acceptance": break_even(ms / base, q - 1)}
            if q > ACCEPTED:
                timer.drafter = imposed(timer.drafter.tree, [1.0] * (ACCEPTED - 1) + [0.0] * (q - ACCEPTED))
                ms = milliseconds(timer, q, ACCEPTED)
                rate = {"step_ms": round(ms, 4), "tokens_s": round(1e3 * ACCEPTED * batch / ms, 1)}
                yield about | {"imposed_tokens_a_step": ACCEPTED} | rate | {"times": round(ACCEPTED * base / ms, 4)}
        except Exception as error:
            yield about | failure(error)
    for (scheme, q), copy in copies.items():
        about |= {"Q": q, "drafter": f"copy:{scheme}"}
        try:
            ms = milliseconds(copy, q, 1, scheme)
            row = about | {"step_ms": round(ms, 4), "drafting_over_plain": round(ms / base, 4)}
            likely = sum(LIKELY**i for i in range(q)) * base / ms
            yield row | {"break_even_acceptance": break_even(ms / base, q - 1), f"times_at_{LIKELY}": round(likely, 4)}
        except Exception as error:
            yield about | failure(error)


def failure(error: Exception) -> Row:
    return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}


def bars(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        case = row.get("batch"), row.get("context")
        if row.get("Q") == 4 and "over_plain" in row and case in BARS:
            name = f"verifying 4 rows over a plain step, batch {case[0]}, context {case[1]}"
            yield bar(name, row["over_plain"], "1", BARS[case], most=True)
        if row.get("Q") == 4 and "times" in row and case[0] == 1:
            name = f"{ACCEPTED} tokens a step (imposed), batch 1, context {case[1]}: times the tokens a second"
            yield bar(name, row["times"], "1", LEAST_TIMES)
