"""The bars that whole steps, kernels and the library are held to: what each asks, and how it stands by the newest
files.

The rules are the functions `bars` of the experiments and benchmarks; here is which of their bars belong together, and
which line of campaign.py measures them.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from experiments.report.documents import Entry, Row
from pallas_kernels.bench.bars import bar

MOST_ROTATING = 1.03  # of a decode step, with K and V in codes that are rotated over the step without
Found = tuple[Entry, Row]  # a bar, and the file that has it


@dataclass(frozen=True)
class Asked:
    """What is held to a bar, the bar in words, the lines of campaign.py that measure it (none: a CPU does), and what
    the names of files, bars and devices match."""

    what: str
    bar: str
    lines: str
    files: str
    names: str
    devices: str = "NVIDIA H.*"  # bars in milliseconds or requests a second are an H200's by themselves

    def found(self, entries: Iterable[Entry]) -> list[Found]:
        """Its bars: of each name and device that of the newest file."""
        newest: dict[tuple[str, str], Found] = {}
        for entry, each in sorted(every_bar(entries), key=lambda found: found[0].document["date"]):
            matches = (self.files, entry.label), (self.devices, entry.device), (self.names, each["name"])
            if all(re.fullmatch(pattern, name) for pattern, name in matches):
                newest[entry.device, each["name"]] = entry, each
        return list(newest.values())


def every_bar(entries: Iterable[Entry]) -> Iterator[Found]:
    """Those of files, and of pairs of files."""
    entries = list(entries)
    yield from ((entry, each) for entry in entries for each in entry.document["bars"])
    yield from rotating(entries)


def rotating(entries: list[Entry]) -> Iterator[Found]:
    """What rotating K and V adds to decode steps: files of one format with -h and without, of one device and commit."""
    steps = {}
    for entry in entries:
        for row in entry.rows if entry.label.startswith("decode_step") else ():
            run = entry.device, entry.document.get("commit"), row["backend"], row["model"], row["batch"]
            steps[run, row["kv"]] = entry, row["decode_ms"]
    for (run, kv), (entry, ms) in steps.items():
        if kv.endswith("-h") and (plain := steps.get((run, kv.removesuffix("-h")))):
            name = f"{run[-2]} batch {run[-1]}, {kv} over {kv.removesuffix('-h')}"
            yield entry, bar(name, round(ms / plain[1], 3), "times", MOST_ROTATING, most=True)


CELL = r"\(R, length\)=\(\d+, \d+\) H/K=\S+ "
BF16, CODES = "bfloat16 KV bfloat16", "w8a8 KV int8-g8"
ASKED = (
    Asked("decode attention, bf16", "FlashInfer's time in the same job", "decode_attention",
          "decode_attention.*", f"{CELL}bf16"),
    Asked("decode attention over 8 and 4 bits", "1.15 (4 bits: 1.4) of bf16's time by bytes", "decode_attention",
          "decode_attention.*", rf"{CELL}(fp8|int[48]-g\d+)"),
    Asked("decode attention over `int4-g128-zp`", "1.25 of the bytes at a copy's rate", "zero_points",
          "decode_attention.*", f"{CELL}int4-g128-zp"),
    Asked("decode attention of 2 or 4 queries", "1.05 of one query's time", "decode_attention",
          "decode_attention.*", rf"{CELL}\S+ Q=\d"),
    Asked("prefill attention", "FlashInfer's time in the same job", "prefill_attention",
          "prefill_attention.*", r"\d+x\d+ causal"),
    Asked("prefill attention, 2,048 after 6,144", "0.8 of cuDNN's rate", "prefill_attention",
          "prefill_attention.*", ".* of cuDNN's rate"),
    Asked("`w4a16-g128` products", "2.8 times XLA's bf16 at one row, 2.3 at 16, 1.3 at 64", "weight_only_matmul",
          "weight_only_matmul.*", "w4a16-g128 .*"),
    Asked("8-bit products", "torch's fp8 time in the same job and 10 %", "fp8_matmul",
          "(fp8|int8)_matmul.*", ".*torch.*"),
    Asked("LLaMA-2-7B decode steps, bf16", "0.82 to 0.88 of the floor, by batch", "throughput",
          "throughput.*", "decode, llama-2-7b bf16 KV bf16, .*"),
    Asked("the same, K and V in `int8-g8`", "0.8 of the floor", "throughput_kv",
          "throughput.*", "decode, llama-2-7b bf16 KV int8-g8, .*"),
    Asked("the same, `w8a8` too", "0.7 of the floor to batch 64, then 0.75", "throughput_w8a8",
          "throughput.*", f"decode, llama-2-7b {CODES}, .*"),
    Asked("LLaMA-2-7B decode steps, `w4a16-g128`, batch 1", "1.75 ms", "quant_steps",
          "quant_steps.*", "decode, w4a16-g128 batch 1 KV bf16"),
    Asked("LLaMA-3-8B decode steps, bf16", "0.82 of the floor", "throughput_8b",
          "throughput.*", "decode, llama-3-8b .*"),
    Asked("prefill of 1,024 tokens or more, bf16", "0.78 of the floor", "throughput",
          "throughput.*", "prefill, .*"),
    Asked("rotating K and V in `int4-g32-h`", "1.03 of a decode step without", "unrotated rotated",
          "decode_step.*", ".*-h over .*"),
    Asked("drawing one of 128,256 tokens", "25 us, for 512 rows 250; with top-k and top-p 60 and 450", "sample",
          "sample.*", "R=(1|512) V=128256 (temperature|top-k, top-p)"),
    Asked("QPS workload", "38 requests a second in bf16, 56 in `w8a8` with K and V in `int8-g8`", "qps qps_w8a8",
          "qps.*", f"QPS workload, llama-2-7b ({BF16}|{CODES}), requests a second"),
    Asked("the same in bf16, over vLLM's", "1.25 times in the same job", "qps",
          "qps.*", f"QPS workload, llama-2-7b {BF16}, times as many as vLLM"),
    Asked("QPS workload in `w8a8`, over vLLM's in fp8", "1.6 times in the same job", "qps_w8a8",
          "qps.*", f"QPS workload, llama-2-7b {CODES}, times as many as vLLM"),
    Asked("QPS workload, Triton's kernels over Mosaic's", "0.8 times", "qps_triton",
          "qps.*", ".*triton over the default"),
    Asked("QPS workload on two GPUs, an engine each", "1.9 times one", "replicas",
          "qps.*", ".* 2 replicas over one"),
    Asked("sums of up to 64 x 4096 over two GPUs", "6 us each in a long chain", "all_reduce",
          "all_reduce.*", "2 ranks, .*"),
    Asked("LLaMA-2-7B on two H200s, bf16", "2.6 ms at batch 1, 3.7 at 64", "two",
          "decode_step-two.*", "llama-2-7b .* on 2 devices"),
    Asked("LLaMA-2-70B on two GPUs, bf16", "0.75 of the floor at batch 1 and 16", "two_70b",
          "decode_step-two.*", "llama-2-70b .* on 2 devices.*"),
    Asked("gap between an engine's decode steps", "0.03 of a step", "step_profile_serve",
          "step_profile_serve.*", "gap between .*"),
    Asked("the host's work a running request a step", "5 us", "",
          "(qps_host|simulate).*", ".*host work a running request a step.*", "cpu"),
    Asked("the first command, on 2 CPU cores", "15 s cold, 6 s once compiled", "",
          "first_command.*", ".* start to the last of .*", "cpu"),
)  # fmt: skip
