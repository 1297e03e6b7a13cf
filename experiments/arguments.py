"""What the command lines of several experiments share."""

import argparse
import os
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from experiments.steps.devices import Ceilings, ceilings_of
from experiments.steps.timer import model_config
from jllm.analysis.outliers import check_strength
from jllm.config import LlamaConfig
from jllm.engine.options import PAGE_SIZES
from jllm.errors import ConfigError, JllmError, QuantizationError
from jllm.files.load import DTYPES
from jllm.model.cache import parse_kv_cache
from jllm.quant.schemes import PRESETS, Scheme, find_scheme
from pallas_kernels.bench.command import Parser
from pallas_kernels.bench.gpus import ask_gpus
from pallas_kernels.bench.numbers import positive, positive_number

MEMORY_SHARE = 0.95  # of a GPU's memory, for weights, pages and steps


def dtype_name(text: str) -> str:
    """Returns a dtype of weights by its name or short name, as `jllm.load` has them."""
    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise argparse.ArgumentTypeError(f"{text!r} is not known; known are {', '.join(DTYPES)}")
    return name


def checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Returns a type of argparse's: text as it is, of which `check` refuses some as the library does."""

    def kept(text: str) -> str:
        try:
            check(text)
        except JllmError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return kept


known_scheme = checked(find_scheme)  # of weights, by its name or in a file


def outlier_strength(text: str) -> float:
    """Returns how many times as large planted outliers are."""
    number = positive_number(text)
    checked(lambda _: check_strength(number))(text)
    return number


def add_model_options(parser: argparse.ArgumentParser, *, scheme: bool = True) -> None:
    """Which model's steps are timed, and over which pages."""
    parser.add_argument("--config", default="configs/llama-2-7b.json", help="model shape (a config.json)")
    parser.add_argument("--layers", type=positive, help="only this many layers, for a try")
    if scheme:
        parser.add_argument("--scheme", type=known_scheme, default="bf16", help="of the weights")
    parser.add_argument("--kv-cache", help="KV format (default: the weights' dtype)")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16", help="of the weights before they are quantized")
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=16, help="tokens a KV page")


def config_of(args: argparse.Namespace, tokens: int = 0) -> LlamaConfig:
    """Returns the shapes that --config and --layers ask for. Before weights take minutes to be made, raises ConfigError
    for a KV format that does not fit them, a --backend that lacks its GPU, and more `tokens` of a slot than its
    context."""
    config = model_config(args.config, args.layers)
    parse_kv_cache(getattr(args, "kv_cache", None), config, jnp.bfloat16)
    check_backend(getattr(args, "backend", None))
    if tokens > config.context:
        raise ConfigError(f"a sequence would have {tokens} tokens: the model's context is {config.context}")
    return config


def check_backend(name: str | Iterable[str] | None) -> None:
    """ConfigError for kernels of GPUs, one backend's or among several, where there is no GPU."""
    asked = {name} if isinstance(name, str) else {*(name or ())}
    if (lacking := asked & {"mosaic", "triton"}) and jax.default_backend() != "gpu":
        raise ConfigError(f"--backend {', '.join(sorted(lacking))} needs a GPU, and here is none: xla runs everywhere")


def add_timing_options(parser: argparse.ArgumentParser, *, steps: int, repeats: int) -> None:
    """How steps are timed, and what their floor is held against."""
    parser.add_argument("--steps", type=positive, default=steps, help="timed together, at least")
    parser.add_argument("--repeats", type=positive, default=repeats, help="runs, of which the fastest counts")
    add_bandwidth(parser)


def add_bandwidth(parser: argparse.ArgumentParser) -> None:
    """What floors count with in place of the device's own bandwidth."""
    parser.add_argument(
        "--bandwidth", type=positive_number, help="bytes a second (default: the device's, of configs/devices)"
    )


def ceilings_here(args: argparse.Namespace) -> Ceilings:
    """Returns those of the device that runs, with the --bandwidth that was asked for."""
    return ceilings_of(jax.devices()[0].device_kind, args.bandwidth)


def claim_memory(patience: float = 20.0) -> None:
    """Lets JAX have MEMORY_SHARE of a GPU, unless the environment says otherwise: its own three quarters leave the
    QPS workload fewer pages than slots. Before JAX first looks at its devices. Raises ConfigError where others still
    hold more than the rest after `patience` seconds, in which a process that just ended gives its memory back: XLA
    would take what there is, and end this process by a failed check once that is full."""
    if {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"} & os.environ.keys():
        return
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() not in ("false", "0"):  # else it takes what it needs
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
    return free.isdecimal() and int(free) < MEMORY_SHARE * int(total)  # a GPU that shares the host's has no number


def scheme_name(given: str) -> str:
    """Returns what a scheme is called, of which the command line may give a file; one that is unknown is refused
    later."""
    try:
        return find_scheme(given).name
    except QuantizationError:
        return given


def by_name(schemes: Iterable[str]) -> dict[str, str | Scheme]:
    """Schemes as the command line gives them, by what they are called: a file's by the name that it says. One that is
    unknown is itself, to be refused where it is used. Raises ConfigError for a name that stands for two."""
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


def check_draws_only(parser: Parser, args: argparse.Namespace) -> None:
    """Ends the command where --draw, which measures nothing, stands beside options of a measurement."""
    if args.draw:
        parser.refuse(vars(args).keys() - {"draw"}, "--draw measures nothing, so it goes without {}")
