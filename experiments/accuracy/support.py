"""Finds out, before a sweep starts, which schemes this machine can run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from experiments.accuracy.rows import AnyScheme, kv_taken, rounded_by
from jllm.errors import ConfigError, JllmError
from jllm.model.backbone import Paged, backbone
from jllm.model.cache import least_page, make_cache, make_tails, parse_kv_cache, with_tails
from jllm.model.model import Model
from pallas_kernels.backends import on_hopper
from pallas_kernels.formats.kv_pages import RowMap

TOKENS, PAGE = 128, 16  # of the trial step


def check_all_run(
    model: Model,
    pairs: Sequence[tuple[str, str]],
    layers: Sequence[str],
    backend: str | None,
    schemes: Mapping[str, AnyScheme],
) -> None:
    """Checks all pairs and layers without computing anything. `schemes` maps their names. Raises ConfigError, in one
    line, with what cannot run and why, and with what can."""
    if backend == "mosaic" and not on_hopper():
        raise ConfigError("backend 'mosaic' needs a Hopper GPU; what this machine runs all of the sweep with is 'xla'")
    named = dict.fromkeys([*(scheme for scheme, _ in pairs), *layers])
    formats = dict.fromkeys(kv for _, kv in pairs)
    dtype = model.params.dtype
    report("scheme", named, lambda name: rounded_by(schemes[name], _shapes(model)))
    report("KV format", formats, lambda kv: parse_kv_cache(kv_taken(kv, dtype), model.config, dtype))
    if backend is not None:  # None chooses, and XLA runs everything
        names = {f"{scheme} with KV {kv}": (schemes[scheme], kv) for scheme, kv in pairs}
        report(f"backend {backend!r}:", names, lambda name: try_step(model, *names[name], backend))


def report(kind: str, names: Iterable[str], attempt: Callable[[str], object]) -> None:
    """Calls attempt(name) for each name; an error means that it cannot run. Raises ConfigError if any cannot."""
    problems, good = {}, []
    for name in names:
        try:
            attempt(name)
            good.append(name)
        except (JllmError, NotImplementedError, ValueError) as error:
            problems[name] = str(error).partition("\n")[0]
    if problems:
        text = "; ".join(f"{kind} {name} cannot run: {why}" for name, why in problems.items())
        raise ConfigError(f"{text}; what can: {', '.join(good) or 'nothing that was asked for'}")


def try_step(model: Model, scheme: AnyScheme, kv: str, backend: str) -> None:
    """Traces the first layer on a step of prompt chunks."""
    first = rounded_by(scheme, _shapes(model, layers=1))
    c, dtype = first.config, model.params.dtype
    formats, page = parse_kv_cache(kv_taken(kv, dtype), c, dtype), max(PAGE, least_page(kv_taken(kv, dtype), c))
    tails = partial(make_tails, c, formats, dtype, 1, page)
    cache = jax.eval_shape(lambda: with_tails(make_cache(c, TOKENS // page, page, formats), tails()))

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32)

    rows = [ints(TOKENS)] * 4
    row_map: Any = RowMap(*rows, sequences=1)  # type: ignore[misc,arg-type]
    batch = Paged(*rows, ints(0, TOKENS // page), ints(0), ints(1, TOKENS // page), ints(2), ints(1))  # type: ignore[call-arg,arg-type]
    batch = replace(batch, row_map=row_map)
    jax.eval_shape(lambda *args: backbone(args[0], c, args[1], args[2], backend=backend), first.params, batch, cache)


def _shapes(model: Model, layers: int | None = None) -> Model:
    """Returns the model with shapes instead of values, and perhaps fewer layers."""
    params = replace(model.params, layers=model.params.layers[:layers])
    count = len(params.layers)
    config = replace(model.config, num_layers=count, windows=model.config.windows[:count])
    return replace(model, config=config, params=jax.eval_shape(lambda p: p, params))
