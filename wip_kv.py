"""Decode attention before and after, timed; kernels come lowered (wip_export.py)."""

import importlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
from jax import export

began = time.time()
new, old = (importlib.import_module(f"{p}.decode_attention.bench") for p in ("pallas_kernels", "pallas_before"))
measure = importlib.import_module("pallas_kernels.bench.measure")
GROUPS = [
    ((32, 32), (64, 1024), ["int8-g8 b", "int8-g8 a", "int4-g32 b", "int4-g32 a", "fp8 a"]),
    ((32, 32), (512, 136), ["int8-g8 b", "int8-g8 a", "int4-g32 a"]),
    ((32, 32), (1, 136), ["bf16 b", "bf16 a", "bf16 s", "int8-g8 b", "int8-g8 a", "int8-g8 s"]),
    ((32, 8), (64, 1024), ["int8-g8 b", "int8-g8 a", "int4-g32 b", "int4-g32 a"]),
    ((32, 32), (16, 136), ["int8-g8 b", "int8-g8 a", "int8-g8 s"]),
    ((32, 32), (16, 1024), ["int8-g8 b", "int8-g8 a", "int8-g8 s"]),
    ((32, 32), (1, 1024), ["bf16 a", "bf16 s", "int8-g8 a", "int8-g8 s"]),
    ((32, 32), (128, 2048), ["int8-g8 a", "int4-g32 a"]),
    ((32, 8), (128, 2048), ["int8-g8 a", "int4-g32 a"]),
]


def name_of(heads, cell, text):
    return "-".join(map(str, (*heads, *cell, text.replace(" ", "-"))))


def made(heads, cell, text):
    kv, who = text.split()
    bench = old if who == "b" else new
    case = bench.Case((cell[1],) * cell[0], heads, 128, 16, kv, kv, "bfloat16")
    changes = {"computing": 1, "split": 128} if who == "s" else {}
    return bench, case, bench.paged(case, "mosaic", **changes)


def compiled(heads, cell, text):
    bench, case, run = made(heads, cell, text)
    made_by, blob = (
        export.deserialize(bytearray(open("wip_blobs/" + name_of(heads, cell, text) + end, "rb").read()))
        for end in (".make", "")
    )
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in blob.in_avals]
    return bench, case, run, jax.jit(made_by.call).lower().compile(), jax.jit(blob.call).lower(*shapes).compile()


def main():
    rows = []
    print("start", round(time.time() - began, 1), flush=True)
    with ThreadPoolExecutor(24) as pool:
        groups = [[pool.submit(compiled, heads, cell, text) for text in texts] for heads, cell, texts in GROUPS]
        for (heads, cell, texts), futures in zip(GROUPS, groups):
            if time.time() - began > float(sys.argv[1]):
                os._exit(0)
            found = [each.result() for each in futures]
            print("compiled", round(time.time() - began, 1), flush=True)
            calls = [partial(f, *make()) for _, _, _, make, f in found]
            times = measure.device_us_of_each(calls)
            del calls
            for text, (bench, case, run, *_), us in zip(texts, found, times):
                us /= run.layers
                rows.append([*heads, *cell, text, round(us, 2), round(bench.moved_bytes(case) / us / 1e6, 2)])
                print(json.dumps(rows[-1]), round(time.time() - began, 1), flush=True)
            json.dump(rows, open(os.environ["OUT"] + "/rows.json", "w"))
    os._exit(0)


if __name__ == "__main__":
    main()
