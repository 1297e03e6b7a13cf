"""What the command lines of several experiments share."""

import argparse
import os
from collections.abc import Iterable

import jax

from experiments.steps.devices import Ceilings, ceilings_of
from jllm.engine.options import PAGE_SIZES
from jllm.errors import ConfigError, QuantizationError
from jllm.pretrained import DTYPES
from jllm.quant.schemes import PRESETS, Scheme, find_scheme
from pallas_kernels.bench.numbers import positive, positive_number

MEMORY_SHARE = 0.95  # of a GPU's memory, for weights, pages and steps


def dtype_name(text: str) -> str:
    """A dtype of weights by its name or short name, as `jllm.load` has them."""
    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise argparse.ArgumentTypeError(f"{text!r} is not known; known are {', '.join(DTYPES)}")
    return name


def add_model_options(parser: argparse.ArgumentParser, *, scheme: bool = True) -> None:
    """Which model's steps are timed, and over which pages."""
    parser.add_argument("--config", default="configs/llama-2-7b.json", help="model shape (a config.json)")
    parser.add_argument("--layers", type=positive, help="only this many layers, for a try")
    if scheme:
        parser.add_argument("--scheme", default="bf16", help="of the weights")
    parser.add_argument("--kv-cache", help="KV format (default: the weights' dtype)")
    parser.add_argument("--dtype", type=dtype_name, default="bfloat16", help="of the weights before they are quantized")
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=16)


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
    """Those of the device that runs, with the --bandwidth that was asked for."""
    return ceilings_of(jax.devices()[0].device_kind, args.bandwidth)


def claim_memory() -> None:
    """Lets JAX have MEMORY_SHARE of a GPU, unless the environment says otherwise: its own three quarters leave the
    QPS workload fewer pages than slots. Before JAX first looks at its devices."""
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(MEMORY_SHARE))


def scheme_name(given: str) -> str:
    """What a scheme is called, of which the command line may give a file; one that is unknown is refused later."""
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


def check_draws_only(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the command where --draw, which measures nothing, stands beside options of a measurement."""
    if args.draw:
        changed = [name for name, value in vars(args).items() if name != "draw" and value != parser.get_default(name)]
        if changed:
            parser.error(f"--draw measures nothing, so it goes without --{changed[0].replace('_', '-')}")
