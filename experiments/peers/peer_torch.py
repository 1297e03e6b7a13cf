"""Times PyTorch's compiled steps of LLaMA-2-7B: prefill, and decoding with one CUDA graph per step (model:
torch_llama.py).

    pip install torch==2.11.0 triton==3.6.0
    pip install flash-attn==2.8.3            # attention's second kind; or PEER_PACKAGES=DIR, with an archive of it
    python -m experiments.peers.peer_torch --rows bf16:b1:in8 --out steps.json     # one GPU, a minute a row and variant

A row is a scheme, a batch and a workload. Schemes are bf16, wo8 (only weights in int8) and w8a8 (int8 matmuls).
Workloads are in8 (8 tokens in, 256 out) and in1024 (1,024 and 1,024). Each row is timed by variants MODE/ATTENTION
until the seconds are spent. Modes are torch.compile's defaults or its autotuning (max); attention is flex_attention or
flash-attn's decode kernel (fa2). All rows run their first variant before any runs its second. A decode step's time is
the mean over three windows of its contexts.
"""

import argparse
import sys
from functools import partial
from typing import Any

from experiments.peers.shared import (
    Output,
    by_commas,
    command,
    event_ms,
    find,
    load_torch,
    parser,
    seconds_left,
    versions_of,
)

WORKLOADS = {"in8": (8, 256), "in1024": (1024, 1024)}
SCHEMES = ("bf16", "wo8", "w8a8")
DEFAULT = ("bf16:b1:in8", "bf16:b32:in8", "w8a8:b32:in8")
WINDOW = 32  # decode steps timed together
GIB = 2**30


def row_of(text: str) -> tuple[str, int, int, int]:
    """Returns the scheme, batch, input and output of bf16:b1:in8."""
    scheme, _, rest = text.partition(":")
    batch, _, workload = rest.partition(":")
    if scheme not in SCHEMES or batch[:1] != "b" or not batch[1:].isdecimal() or workload not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"{text!r} must be like bf16:b1:in8, of {', '.join((*SCHEMES, *WORKLOADS))}")
    return scheme, int(batch[1:]), *WORKLOADS[workload]


def variants_of(fa2: bool) -> list[tuple[str, str]]:
    attentions = ("flex", "fa2") if fa2 else ("flex",)
    return [(mode, attention) for mode in ("default", "max") for attention in attentions]


def measure(weights: Any, batch: int, prompt: int, output: int, mode: str, attention: str) -> dict[str, float]:
    """Returns the milliseconds of prefill and of a decode step, and the memory of both."""
    import torch

    from experiments.peers.torch_llama import Steps, captured, fresh_compiler

    with fresh_compiler():
        torch.cuda.reset_peak_memory_stats()
        steps = Steps(weights, batch, prompt + output, mode, attention)
        prompts = torch.randint(3, weights.shape.vocab, (batch, prompt), device="cuda")
        for _ in range(2):  # compiles
            steps.prefill(prompts)
        read = captured(lambda: steps.prefill(prompts)) if prompts.numel() <= 16384 else lambda: steps.prefill(prompts)
        prefill = sorted(event_ms(torch, read) for _ in range(5))[2]
        step = captured(steps.step)
        window, times = min(WINDOW, output // 3), []
        for begin in (prompt, prompt + output // 2, prompt + output - window):
            steps.positions.fill_(begin)
            step()
            steps.positions.fill_(begin)
            times.append(event_ms(torch, lambda: [step() for _ in range(window)]) / window)
        memory = torch.cuda.max_memory_allocated() / GIB
    return {"prefill_ms": prefill, "decode_ms": sum(times) / len(times), "mem_gib": memory}


def run(args: argparse.Namespace) -> None:
    fa2 = find("flash_attn")
    torch = load_torch("torch==2.11.0 triton==3.6.0")
    from experiments.peers.torch_llama import Shape, random_weights

    output = Output(args.out, versions_of("torch", "triton", *["flash_attn"] * fa2))
    weights: Any = None
    variants = variants_of(fa2)
    for mode, attention in variants:
        for scheme, batch, prompt, new in sorted(args.rows, key=lambda row: SCHEMES.index(row[0])):
            about = {"quant": scheme, "batch": batch, "input_len": prompt, "output_len": new}
            about |= {"mode": mode, "attn": attention}
            if seconds_left(args) < 0:
                if (mode, attention) == variants[0]:  # a row needs only its first variant
                    output.add(about | {"error": "no time left"})
                continue
            if weights is None or weights.scheme != scheme:
                weights = None
                torch.cuda.empty_cache()
                weights = random_weights(Shape(), scheme)
            output.attempt(about, partial(measure, weights, batch, prompt, new, mode, attention))


def options() -> argparse.ArgumentParser:
    made = parser(__doc__, 330)
    rows = [row_of(text) for text in DEFAULT]
    made.add_argument(
        "--rows",
        type=lambda text: [row_of(part) for part in by_commas(text)],
        default=rows,
        metavar="SCHEME:bBATCH:WORKLOAD,..",
        help=f"rows (default: {','.join(DEFAULT)})",
    )
    return made


if __name__ == "__main__":
    sys.exit(command(run, options()))
