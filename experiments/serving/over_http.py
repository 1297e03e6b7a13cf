"""Sends a workload to a server of jllm.serve."""

import argparse
import asyncio
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.result_file import rounded
from experiments.serving.workload import PERCENTILES, Request, Row, half_interval, percentile
from experiments.steps import wire
from jllm.files.hf_config import load_config


def measure_url(requests: list[Request], args: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each repeat over HTTP and then their summary. Prompts use --config's vocabulary."""
    target = wire.Target.of(args.url, os.environ.get("JLLM_API_KEY"))
    names = ("temperature", "top_k", "top_p", "min_p")
    body = {name: getattr(args, name) for name in names} | {"ignore_eos": True, "stream": args.stream}
    vocab = load_config(Path(args.config)).vocab_size

    def run(some: Sequence[Request], seed: int) -> tuple[list[wire.Answered], float]:
        return asyncio.run(wire.serve(target, [(r.prompt, r.output, r.arrival) for r in some], vocab, seed, body))

    about = {"over": "http", "stream": args.stream, "rate": args.rate}
    run([Request(r.prompt, min(r.output, 16), 0.0) for r in requests[: args.warmup]], args.seed)
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
        rows.append(row)
        yield {**about, "repeat": repeat, **rounded(row)}
    means = {name: [row[name] for row in rows] for name in rows[0]}
    total = {name: None if None in values else statistics.fmean(values) for name, values in means.items()}
    yield {**about, "repeat": "mean", "repeats": len(rows), "qps_ci": half_interval(means["qps"]), **rounded(total)}
