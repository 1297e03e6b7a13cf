"""Sends a workload to a server of the OpenAI API."""

import argparse
import asyncio
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.result_file import rounded
from experiments.serving.workload import PERCENTILES, Request, Row, half_interval, percentile
from experiments.steps import wire
from experiments.steps.timer import stopwatch
from jllm.errors import ConfigError
from jllm.files.hf_config import load_config


def measure_url(requests: list[Request], args: argparse.Namespace) -> Iterator[Row]:
    """Returns the rows of a server, which it first asks for its vocabulary and context. Prompts use --config's
    vocabulary if the server tells none. Raises ConfigError for requests longer than the context."""
    target = wire.Target.of(args.url, os.environ.get("JLLM_API_KEY"))
    vocab, context = target.limits()
    if context and (long := [i for i, r in enumerate(requests) if r.prompt + r.output > context]):
        fewer = f"--requests {long[0]} leaves them out, or " if long[0] else ""
        raise ConfigError(
            f"{len(long)} of {len(requests)} requests are longer than the server's context, {context} tokens: {fewer}"
            "give another --workload"
        )
    return measure_target(target, vocab or load_config(Path(args.config)).vocab_size, requests, args)


def measure_target(target: wire.Target, vocab: int, requests: list[Request], args: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each repeat and then their summary. Token ids are below `vocab`."""
    note = stopwatch()
    names = ("temperature", "top_k", "top_p", "min_p")
    body = {name: getattr(args, name) for name in names} | {"ignore_eos": True, "stream": args.stream}

    def run(some: Sequence[Request], seed: int) -> tuple[list[wire.Answered], float]:
        return asyncio.run(wire.serve(target, [(r.prompt, r.output, r.arrival) for r in some], vocab, seed, body))

    about = {"over": "http", "stream": args.stream, "rate": args.rate}
    warm, _ = run([Request(r.prompt, min(r.output, 16), 0.0) for r in requests[: args.warmup]], args.seed)
    note(f"served {len(warm)} requests to warm up")
    rows = []
    for repeat in range(args.repeats):
        answers, seconds = run(requests, args.seed + 1 + repeat)  # new prompts: no prefix is cached
        tokens = sum(r.output for r in requests)
        row: Row = {"requests": len(answers), "seconds": seconds, "qps": len(answers) / seconds}
        row["output_tokens_s"] = tokens / seconds
        gaps = [gap for answer in answers for gap in answer.gaps]
        for p in PERCENTILES:
            row[f"ttft_ms_p{p}"] = 1e3 * percentile([a.first for a in answers], p) if args.stream else None
            row[f"itl_ms_p{p}"] = 1e3 * percentile(gaps, p) if gaps else None
            row[f"e2e_ms_p{p}"] = 1e3 * percentile([a.total for a in answers], p)
        note(f"repeat {repeat}: {len(answers)} requests in {seconds:.2f} s")
        rows.append(row)
        yield {**about, "repeat": repeat, **rounded(row)}
    means = {name: [row[name] for row in rows] for name in rows[0]}
    total = {name: None if None in values else statistics.fmean(values) for name, values in means.items()}
    yield {**about, "repeat": "mean", "repeats": len(rows), "qps_ci": half_interval(means["qps"]), **rounded(total)}
