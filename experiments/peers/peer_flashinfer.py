"""Times FlashInfer's paged attention: decoding with one query per sequence, and causal prefill, over shuffled pages.

    pip install torch==2.11.0 flashinfer-python==0.7.2.post1     # or PEER_PACKAGES=DIR, with an archive of it in DIR
    python -m experiments.peers.peer_flashinfer --out attention.json  # one GPU, two minutes

K, V and queries are bfloat16, heads have 128 dimensions, and pages 16 tokens. plan() runs before and is not timed, as
an engine plans once per step for all layers. Decode variants are cuda (CUDA cores, the default), tc (tensor cores),
both with -g as planned for CUDA graphs, fa3 (the Hopper kernel) and xqa (TensorRT-LLM's). Prefill variants are fa2 and
fa3. Each is first compared with float64 on a small case. The pip package compiles its kernels at first use, which takes
nvcc and minutes. An archive has compiled kernels; with FLASHINFER_DISABLE_JIT=1 a missing one is an error.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from experiments.peers.shared import (
    Output,
    by_commas,
    command,
    copies_of,
    graph_us,
    load,
    load_torch,
    parser,
    said,
    seconds_left,
    versions_of,
)

NEEDS = "flashinfer-python==0.7.2.post1"
D, PAGE = 128, 16
HEADS = ((32, 32), (32, 8))  # heads of queries, and of K and V
DECODE = ((1, 1024), (1, 16384), (16, 1024), (64, 1024), (128, 2048), (256, 512))  # sequences, tokens of each
PREFILL = ((1, 2048), (8, 1024), (1, 16384))
VARIANTS = {"decode": ("cuda", "cuda-g", "tc", "tc-g", "fa3", "xqa"), "prefill": ("fa2", "fa3")}
CHECKED = {"decode": (1, 17, 300, 512, 1000), "prefill": (5, 130, 257)}  # tokens of the small case's sequences
OFF = 2e-2  # allowed relative error from float64

Run = Callable[[Any, Any, Any], Any]  # queries, pages, output


class Pages:
    """The pages of each sequence, in random order."""

    def __init__(self, torch: Any, lengths: Sequence[int], device: str = "cuda") -> None:
        counts = [-(-length // PAGE) for length in lengths]
        self.torch, self.lengths, self.count = torch, list(lengths), sum(counts)
        shuffled = torch.randperm(self.count, generator=torch.Generator().manual_seed(0))
        starts, last = torch.tensor([0, *counts]).cumsum(0), [(length - 1) % PAGE + 1 for length in lengths]
        self.starts, self.indices = (each.to(torch.int32).to(device) for each in (starts, shuffled))
        self.last = torch.tensor(last, dtype=torch.int32, device=device)

    def random(self, kv_heads: int) -> Any:
        shape = self.count, 2, PAGE, kv_heads, D
        return self.torch.randn(shape, device=self.starts.device, dtype=self.torch.bfloat16)

    def kv_of(self, pages: Any, i: int) -> tuple[Any, Any]:
        """Returns the K and V of sequence i, [length, heads, D]."""
        chosen = pages[self.indices[self.starts[i] : self.starts[i + 1]].long()]
        k, v = (chosen[:, side].flatten(0, 1)[: self.lengths[i]] for side in (0, 1))
        return k, v


def planned_decode(flashinfer: Any, variant: str, table: Pages, heads: int, kv_heads: int) -> Run:
    torch, scale = table.torch, D**-0.5
    if variant == "xqa":
        counts = (table.starts[1:] - table.starts[:-1]).tolist()
        rows = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
        for row, begin, count in zip(rows, table.starts.tolist(), counts):
            row[:count] = table.indices[begin : begin + count]
        lengths = torch.tensor(table.lengths, dtype=torch.int32, device="cuda")
        space, xqa = workspace(torch), flashinfer.decode.xqa_batch_decode_with_kv_cache
        options = {"bmm1_scale": scale, "bmm2_scale": 1.0, "kv_layout": "NHD"}
        return lambda q, kv, out: xqa(
            q, (kv[:, 0], kv[:, 1]), space, rows, lengths, max(table.lengths), out=out, **options
        )
    options = {"use_tensor_cores": not variant.startswith("cuda")}
    if not variant.startswith("cuda"):
        options["backend"] = "fa3" if variant == "fa3" else "fa2"
    if variant.endswith("-g"):
        buffers = {"indptr": table.starts, "indices": table.indices, "last_page_len": table.last}
        options |= {f"paged_kv_{name}_buffer": each.clone() for name, each in buffers.items()}
        options["use_cuda_graph"] = True
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(torch), "NHD", **options)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(table.starts, table.indices, table.last, heads, kv_heads, D, PAGE, pos_encoding_mode="NONE", **types)
    return lambda q, kv, out: wrapper.run(q, kv, out=out)


def planned_prefill(flashinfer: Any, variant: str, table: Pages, heads: int, kv_heads: int) -> Run:
    torch = table.torch
    queries = torch.tensor([0, *table.lengths]).cumsum(0).to(torch.int32).cuda()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(torch), "NHD", backend=variant)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(queries, table.starts, table.indices, table.last, heads, kv_heads, D, PAGE, causal=True, **types)
    return lambda q, kv, out: wrapper.run(q, kv, out=out)


PLANNED = {"decode": planned_decode, "prefill": planned_prefill}


def workspace(torch: Any) -> Any:
    return torch.zeros(384 << 20, dtype=torch.uint8, device="cuda")


def attention(torch: Any, q: Any, k: Any, v: Any) -> Any:
    """Returns causal attention in float64: q [n, heads, D] are the last queries of K and V [m, heads, D]."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (each.double().repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) * D**-0.5
    hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def error_of(flashinfer: Any, torch: Any, part: str, variant: str, heads: int, kv_heads: int) -> float:
    """Returns a variant's relative error from float64, on sequences of different lengths."""
    table = Pages(torch, CHECKED[part])
    counts = [1] * len(table.lengths) if part == "decode" else table.lengths
    pages = table.random(kv_heads)
    q = torch.randn(sum(counts), heads, D, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    PLANNED[part](flashinfer, variant, table, heads, kv_heads)(q, pages, out)
    right = [attention(torch, each, *table.kv_of(pages, i)) for i, each in enumerate(q.split(counts))]
    exact = torch.cat(right)
    return float(((out.double() - exact).norm() / exact.norm()).item())


def timed(flashinfer: Any, torch: Any, part: str, variant: str, size: tuple[int, int], heads: tuple[int, int]) -> dict:
    """Returns microseconds, and the rate of bytes (decode) or of operations (prefill)."""
    (batch, context), (of_q, of_kv) = size, heads
    table = Pages(torch, [context] * batch)
    call = PLANNED[part](flashinfer, variant, table, of_q, of_kv)
    nbytes = 2 * batch * context * of_kv * D * 2
    caches = [table.random(of_kv) for _ in range(copies_of(nbytes) if part == "decode" else 1)]
    rows = batch if part == "decode" else batch * context
    q = torch.randn(rows, of_q, D, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    us = graph_us(torch, [partial(call, q, kv, out) for kv in caches])
    if part == "decode":
        return {"us": us, "gbs": nbytes / us / 1e3}
    return {"us": us, "tflops": 2 * batch * of_q * context**2 * D / us / 1e6}


def run(args: argparse.Namespace) -> None:
    torch = load_torch()
    if importlib.util.find_spec("flashinfer") is None:  # an archive has its kernels
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
        os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.gettempdir())
    flashinfer = load("flashinfer", NEEDS)
    load("flashinfer.decode", NEEDS)
    output = Output(args.out, versions_of("flashinfer", "torch"))
    for part in args.parts:
        variants = args.backends or VARIANTS[part]
        for variant in [each for each in VARIANTS[part] if each in variants]:
            for heads in HEADS:
                about = {"part": part, "backend": f"fi-{variant}", "hq": heads[0], "hk": heads[1], "page": PAGE}
                try:
                    off = error_of(flashinfer, torch, part, variant, *heads)
                except Exception as error:  # loses only this variant's rows
                    output.add(about | {"error": said(error)})
                    continue
                if not off < OFF:
                    output.add(about | {"error": f"its values are off by {off:.2g}"})
                    continue
                for size in DECODE if part == "decode" else PREFILL:
                    of = about | {"batch": size[0], "ctx": size[1], "rel_err": off}
                    if seconds_left(args) < 0:
                        output.add(of | {"error": "no time left"})
                        continue

                    def measured(
                        part: str = part, variant: str = variant, size: Any = size, heads: Any = heads
                    ) -> dict:
                        return timed(flashinfer, torch, part, variant, size, heads)

                    output.attempt(of, measured)


def options() -> argparse.ArgumentParser:
    made = parser(__doc__, 120)
    made.add_argument("--parts", type=by_commas, default=[*VARIANTS], help="parts: decode, prefill (default: both)")
    made.add_argument("--backends", type=by_commas, help="variants to time (default: all)")
    return made


if __name__ == "__main__":
    sys.exit(command(run, options()))
