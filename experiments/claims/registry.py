"""Lists the claims. Claim C5 is CLAIM of experiments.claims.c5, which is imported on demand."""

import difflib
import importlib

from experiments.claims.claim import Claim

TITLES = {
    "C1": "dynamic batching over static batches",
    "C2": "VM allocator and paging over reserving the longest length",
    "C3": "pipelined host work over a host that waits each step",
    "C4": "sampling without a sort over sampling by sorting",
    "C5": "Decoding Attention over flash attention for decode",
    "C6": "int8 KV cache: more requests, accuracy kept",
    "C7": "W8A8 over 16-bit matmul",
    "C8": "INT4 weights over 16-bit ones, by batch",
    "C9": "INT8 error against FP8 error",
    "C10": "group quantization is the most accurate of the integer schemes; group 8 is the ceiling",
    "C11": "no-padding saves prefill work",
    "C12": "paging does not help past batch 512 or with GQA",
    "C13": "matrix products' share of a step",
    "C14": "prefill's share of a generation, by prompt and output length",
    "C15": "NF4 over linear INT4 at equal bits",
    "C16": "KV offload in mid-flight cannot pay",
    "C17": "a length predictor is what admission needs",
    "C18": "the four fusions one by one against the unfused model",
    "C19": "shares of tokenizing, computing, sampling and returning",
    "C20": "KV cache's share of memory at capacity",
    "C21": "KV dequantization hides behind memory even at 10x its arithmetic",
    "C22": "KV cache over recomputation, and flash over naive attention",
    "C23": "service quality: requests a second that are served in time",
    "C24": "the Merge Step over prompts and decodes in steps of their own",
    "C25": "FP8 about as fast as INT8, both faster than INT4 in serving",
    "C26": "what an int8 KV cache's larger batch gives at full memory",
    "C27": "half of what static batches compute is not wanted",
    "C28": "dynamic batching's latency against static batches at the same load",
    "C29": "grouped queries hardly cost quality",
    "C30": "CUDA cores suffice for decode attention",
    "C31": "a library's attention behind a pass that dequantizes",
    "C32": "below about 100 billion parameters a decode step stays under 50 ms",
}


def find(name: str) -> Claim:
    """Returns the claim called `name`, in upper or lower case. Raises ValueError for an unknown name, with similar
    ones."""
    known = name.upper()
    if known not in TITLES:
        near = difflib.get_close_matches(known, TITLES, n=3, cutoff=0.5)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(f"unknown claim {name!r}{hint}; claims: {', '.join(TITLES)}")
    return importlib.import_module(f"experiments.claims.{known.lower()}").CLAIM
