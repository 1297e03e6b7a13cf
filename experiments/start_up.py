"""Times an engine's start from its weights: to the first token of its first request, and until all sizes of steps are
compiled. One start is cold; another has the compiled steps that the first one left in files.

    python -m experiments.start_up --config configs/llama-2-7b.json --slots 512

Each start has its own process, random weights and an empty JAX compilation cache. It serves a request as soon as the
size that holds every step is there, and compiles the others meanwhile, as jllm.serve does. --processes sets how many
others trace steps beside a cold one (jllm/programs/tracing.py). Several numbers each have their cold start, in order.
The bars of a cold start apply with the usual number.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax

from experiments.arguments import claim_memory, dtype_name, known_scheme, scheme_name
from experiments.result_file import bar, command_line, record, refusing
from experiments.serving.engines import make_model
from jllm.engine.engine import Engine
from jllm.engine.options import EngineOptions
from jllm.engine.request import SamplingParams
from jllm.files.hf_config import load_config
from jllm.model.cache import parse_kv_cache
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import natural, positive

Row = dict[str, Any]
# Seconds on a GPU, for 7B and 512 slots
BARS = {("cold", "first_token_s"): 35.0, ("cold", "start_s"): 70.0, ("warm", "start_s"): 3.0}
SAID = {"first_token_s": "first token of a {} start", "start_s": "{} start"}
USUAL = "usual"  # the number of processes of an engine that is not told
SAMPLING = SamplingParams(max_new_tokens=2, ignore_eos=True)


def start(args: argparse.Namespace, folder: Path, processes: int | None) -> Row:
    """Returns the row of one start, in a process that has not used JAX."""
    claim_memory()
    jax.config.update("jax_enable_compilation_cache", False)
    model = make_model(args)
    jax.block_until_ready(model.params)
    begin = time.perf_counter()
    options = {"max_slots": args.slots, "kv_cache": args.kv_cache, "num_pages": args.pages}
    options |= {"compile_processes": processes}
    engine = Engine(model, executables=folder, **options)
    made = time.perf_counter()
    engine.compile_ahead([SAMPLING], wait=False)
    engine.submit([1, 2, 3], SAMPLING)
    while not engine.metrics()["output_tokens"]:
        engine.step()
    first = time.perf_counter()
    sizes = engine.compile_ahead([SAMPLING])
    end = time.perf_counter()
    times = {"start_s": end - begin, "engine_s": made - begin, "first_token_s": first - begin}
    device, m = jax.devices()[0], engine.metrics()
    return {
        "processes": USUAL if processes is None else processes, "sizes": sizes,
        "loaded": m["compile_loaded"], "elsewhere": m["compile_elsewhere"],
        **{k: round(v, 2) for k, v in times.items()},
        "device": f"{device.platform}: {device.device_kind}",
    }  # fmt: skip


def measure(args: argparse.Namespace) -> Iterator[Row]:
    path = Path(args.model or args.config)
    name = path.parent.name if path.stem == "config" else path.stem
    about = {"model": name, "scheme": scheme_name(args.quantize or args.dtype), "slots": args.slots}
    for processes in args.processes:
        with tempfile.TemporaryDirectory() as folder:
            for repeat in range(args.repeats + 1 if processes == args.processes[-1] else 1):
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    row = pool.submit(start, args, Path(folder), processes).result()
                kind = "warm" if repeat else "cold"
                said = f"{kind} start: first token after {row['first_token_s']} s, all sizes after {row['start_s']} s"
                print(said, file=sys.stderr, flush=True)
                yield {**about, "start": kind, **row}
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
    print(f"the files of {row['sizes']} sizes of steps take {size / (1 << 20):.0f} MiB", file=sys.stderr)


def bars(rows: list[Row]) -> Iterator[Row]:
    """Yields the slowest start of each kind. Those of LLaMA-7B with 512 slots on a GPU have bars; cold ones only with
    the usual number of processes."""
    chosen = [
        row for row in rows if (row["model"], row["slots"]) == ("llama-2-7b", 512) and row["device"].startswith("gpu")
    ]
    for (kind, what), most in BARS.items():
        of_kind = (row for row in chosen if row["start"] == kind and (kind == "warm" or row["processes"] == USUAL))
        slowest = max(of_kind, key=lambda row: row[what], default=None)
        if slowest is not None:
            name = f"{SAID[what].format(kind)}, {slowest['model']} {slowest['scheme']}, {slowest['slots']} slots"
            yield bar(name, slowest[what], "s", most, most=True)


@refusing
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.set_defaults(host_only=False, guided=None, devices=None, replicas=None)  # make_model reads them
    parser.add_argument(
        "--config", default="configs/llama-2-7b.json", help="file with the model's shape (a config.json)"
    )
    parser.add_argument("--model", help="directory or id of a model, instead of random weights")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16", help="dtype of random weights")
    parser.add_argument("--quantize", type=known_scheme, help="scheme of the weights")
    parser.add_argument("--slots", type=positive, default=512, help="most sequences that run at once")
    parser.add_argument("--pages", type=positive, help="number of KV pages (default: as memory allows)")
    parser.add_argument("--kv-cache", help="KV format")
    processes = "extra processes that trace steps of a cold start; one cold start per number (default: as is usual)"
    parser.add_argument("--processes", type=natural, nargs="+", default=[None], metavar="N", help=processes)
    parser.add_argument(
        "--repeats", type=positive, default=2, help="repeats of the warm start, after the last cold one"
    )
    add_result_options(parser)
    args = parser.parse_args(argv)
    if not args.model:
        parse_kv_cache(args.kv_cache, load_config(args.config), args.dtype)
    most = max((each for each in args.processes if each is not None), default=None)
    EngineOptions(max_slots=args.slots, num_pages=args.pages, compile_processes=most)
    rows = list(measure(args))  # before this process uses the device and takes its memory
    return record(args, "start_up", command_line("start_up", argv), rows, bars=bars)


if __name__ == "__main__":
    sys.exit(main())
