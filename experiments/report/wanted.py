"""Bars that are asked for and that no file has a figure of: what is left to measure."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from experiments.report.documents import Entry


@dataclass(frozen=True)
class Wanted:
    """What a bar is of, the line of campaign.py that measures it, and what names of files and bars match."""

    what: str
    command: str
    file: str
    bar: str
    device: str = "NVIDIA H200"


WANTED = (
    Wanted(
        "decode attention beside FlashInfer",
        "decode_attention",
        "decode_attention.*",
        r"\(R, length\)=\(\d+, \d+\) H/K=\S+ bf16",
    ),
    Wanted("prefill attention beside FlashInfer", "prefill_attention", "prefill_attention.*", r"\d+x\d+ causal"),
    Wanted("8-bit products beside torch's", "fp8_matmul", "(fp8|int8)_matmul.*", ".*torch.*"),
    Wanted("`w8a8` requests a second beside vLLM in fp8", "qps_w8a8", "qps.*w8a8.*", ".*times as many as vLLM"),
    Wanted(
        "requests a second by Triton's kernels over the default", "qps_triton", "qps.*", ".*triton over the default"
    ),
    Wanted("`int4-g128-zp` K and V by their bytes", "zero_points", "decode_attention.*", r"\(R, .*int4-g128-zp"),
    Wanted("sums over two H200s", "all_reduce", "all_reduce.*", "2 ranks, .*"),
    Wanted("LLaMA-2-7B on two H200s", "two", "decode_step-two.*", "llama-2-7b .* on 2 devices"),
    Wanted("LLaMA-2-70B on two H200s", "two_70b", "decode_step-two.*", "llama-2-70b .* on 2 devices.*"),
)


def without_figure(entries: Iterable[Entry], wanted: Iterable[Wanted] = WANTED) -> Iterator[Wanted]:
    """Those that the bars of no file are of."""
    found = [(entry.label, entry.device, bar["name"]) for entry in entries for bar in entry.document["bars"]]
    for each in wanted:
        if not any(
            re.fullmatch(each.file, label) and device == each.device and re.fullmatch(each.bar, name)
            for label, device, name in found
        ):
            yield each
