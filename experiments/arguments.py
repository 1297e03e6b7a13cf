"""Defines the command-line options that experiments share."""

import argparse
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax.numpy as jnp

from experiments.steps.devices import Ceilings, ceilings_of
from experiments.steps.timer import model_config
from experiments.texts.read import BUNDLED_TEXT
from jllm.config import LlamaConfig
from jllm.engine.options import PAGE_SIZES
from jllm.errors import ConfigError, JllmError, QuantizationError
from jllm.files.load import BUNDLED, DTYPES
from jllm.model.cache import parse_kv_cache
from jllm.quant.schemes import PRESETS, Scheme, find_scheme
from pallas_kernels.bench.gpus import ask_gpus, device_kind
from pallas_kernels.bench.numbers import positive, positive_number
from pallas_kernels.starting import sees_gpu

MEMORY_SHARE = 0.95  # share of a GPU's memory for weights, pages and steps


def dtype_name(text: str) -> str:
    """Returns the dtype of weights for a name or short name of `jllm.load`."""
    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise argparse.ArgumentTypeError(f"{text!r} is not known; known are {', '.join(DTYPES)}")
    return name


def checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Returns a type for argparse. It keeps the text, and refuses what `check` refuses."""

    def kept(text: str) -> str:
        try:
            check(text)
        except JllmError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return kept


known_scheme = checked(find_scheme)  # scheme of weights, by its name or file


def add_model_options(parser: argparse.ArgumentParser, *, scheme: bool = True) -> None:
    """Adds the options of the model and pages of timed steps."""
    parser.add_argument(
        "--config", default="configs/llama-2-7b.json", help="file with the model's shape (a config.json)"
    )
    parser.add_argument("--layers", type=positive, help="use only this many layers, for a trial")
    if scheme:
        parser.add_argument("--scheme", type=known_scheme, default="bf16", help="scheme of the weights")
    parser.add_argument("--kv-cache", help="KV format (default: the weights' dtype)")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16", help="dtype of the weights before quantization")
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=16, help="tokens per KV page")


def add_subject_options(parser: argparse.ArgumentParser, *, tokens: int | None = None, backend: bool = False) -> None:
    """Adds the options of a model whose accuracy is measured, and of its text. With `tokens`, the text is cut there,
    and scored by a protocol."""
    parser.add_argument("--text", type=Path, default=BUNDLED_TEXT, help="UTF-8 file, .jsonl of documents, or wikitext")
    parser.add_argument("--model", default=BUNDLED, help="directory or Hub id (default: the bundled model)")
    parser.add_argument("--dtype", help="dtype of weights and arithmetic (default: as stored; on a CPU at least f32)")
    if tokens is not None:
        parser.add_argument("--tokens", type=positive, default=tokens, help="most tokens of the text")
        parser.add_argument(
            "--protocol",
            help="protocol of analysis.protocols (default: document; windows-512 of one text; wikitext2-2048 of "
            "wikitext, if the model's context has room)",
        )
    if backend:
        parser.add_argument(
            "--backend", help="kernels: xla, mosaic or triton (default: the best for the device and each format)"
        )


def config_of(args: argparse.Namespace, tokens: int = 0) -> LlamaConfig:
    """Returns the shapes of --config and --layers. Checks options before weights take minutes to build. Raises
    ConfigError for a KV format that does not fit, a --backend without its GPU, and `tokens` beyond the context."""
    config = model_config(args.config, args.layers)
    parse_kv_cache(getattr(args, "kv_cache", None), config, jnp.bfloat16)
    check_backend(getattr(args, "backend", None))
    if tokens > config.context:
        raise ConfigError(f"a sequence would have {tokens} tokens: the model's context is {config.context}")
    return config


def check_backend(name: str | Iterable[str] | None) -> None:
    """Raises ConfigError if a backend needs a GPU and there is none."""
    asked = {name} if isinstance(name, str) else {*(name or ())}
    if (lacking := asked & {"mosaic", "triton"}) and not sees_gpu():
        raise ConfigError(f"--backend {', '.join(sorted(lacking))} needs a GPU, and here is none: xla runs everywhere")


def add_timing_options(parser: argparse.ArgumentParser, *, steps: int, repeats: int) -> None:
    """Adds the options of timing steps and of their floor."""
    parser.add_argument("--steps", type=positive, default=steps, help="least number of steps timed together")
    parser.add_argument("--repeats", type=positive, default=repeats, help="number of runs; the fastest counts")
    add_bandwidth(parser)


def add_bandwidth(parser: argparse.ArgumentParser) -> None:
    """Adds the option that replaces the device's own bandwidth in floors."""
    parser.add_argument(
        "--bandwidth",
        type=positive_number,
        help="bandwidth in bytes per second (default: the device's, of configs/devices)",
    )


def ceilings_here(args: argparse.Namespace) -> Ceilings:
    """Returns the ceilings of the device that runs, with --bandwidth."""
    return ceilings_of(device_kind(), args.bandwidth)


def claim_memory(patience: float = 20.0) -> None:
    """Lets JAX have most of a GPU's memory, unless the environment sets a share. JAX's default of three quarters leaves
    the QPS workload fewer pages than slots. Call it before JAX first looks at its devices.

    Raises ConfigError if other processes still hold too much memory after `patience` seconds. A process that just ended
    needs that time to release its memory. XLA itself would start, and end this process later by a failed check.
    """
    if {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"} & os.environ.keys():
        return
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() not in ("false", "0"):  # JAX takes what it needs
        _wait_for_memory(patience)
    os.environ["XLA_CLIENT_MEM_FRACTION"] = str(MEMORY_SHARE)


def _wait_for_memory(patience: float) -> None:
    until = time.monotonic() + patience
    while held := next(filter(_is_held, ask_gpus("index", "memory.free", "memory.total")), None):
        if time.monotonic() > until:
            name, free, total = held
            raise ConfigError(
                f"GPU {name}: {MEMORY_SHARE:.0%} of its memory is claimed, and {free} of {total} MiB are free: wait "
                f"for what else runs there, or set XLA_CLIENT_MEM_FRACTION below {int(free) / int(total):.2f}"
            )
        time.sleep(0.5)


def _is_held(gpu: list[str]) -> bool:
    _, free, total = gpu
    return free.isdecimal() and int(free) < MEMORY_SHARE * int(total)  # no number: the GPU has the host's memory


def scheme_name(given: str) -> str:
    """Returns the name of a scheme, which may be in a file. An unknown scheme keeps its text, and fails later."""
    try:
        return find_scheme(given).name
    except QuantizationError:
        return given


def by_name(schemes: Iterable[str]) -> dict[str, str | Scheme]:
    """Returns the command line's schemes by their names. A scheme in a file has the name that the file gives. An
    unknown scheme keeps its text, and fails where it is used. Raises ConfigError for a name with two schemes."""
    found: dict[str, str | Scheme] = {}
    for given in schemes:
        try:
            scheme = find_scheme(given)
        except QuantizationError:
            found[given] = given
            continue
        known = {**PRESETS, **found}.get(scheme.name)
        if isinstance(known, Scheme) and (known.rules, known.rotate) != (scheme.rules, scheme.rotate):
            raise ConfigError(f"{given}: another scheme is called {scheme.name!r}: give this one another `name`")
        found[scheme.name] = scheme
    return found
