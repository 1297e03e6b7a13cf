"""Floors of a result's rows by the limits of today, whatever they were when it was measured.

A share of a floor is the floor over a time, and only the time was measured. So each row's floor is computed again from
its model, batch and lengths and the options of its command; where it is another one than the row has, the row gets it
and its shares. Rows of models that configs/ does not have keep what they have, as do those of commands with options
that are gone.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from experiments import decode_step, qps, quant_steps
from experiments.qps import token_bytes
from experiments.report.commands import arguments_of, module_of
from experiments.result_file import rounded
from experiments.steps.batches import WholeBatch
from experiments.steps.cost_model import CONFIGS, shapes_of
from experiments.steps.floors import HBM, PEAKS, make_floor, workload_seconds
from jllm.config import load_config
from jllm.engine.options import EngineOptions, resolve
from jllm.pretrained import Model

Row = dict[str, Any]
Args = argparse.Namespace
PLAIN = ("bf16", "bfloat16")
SHARES = {  # floor -> its share, and the time that it is of
    "decode_floor_ms": ("floor_fraction", "decode_ms"),
    "prefill_floor_ms": ("prefill_floor_fraction", "prefill_ms"),
    "floor_s": ("floor_fraction", "seconds"),
    "floor_ms": ("floor_fraction", "decode_ms"),
}
CASE = ("scheme", "kv", "batch", "input", "output", "devices", "pages_total")  # what rows of one floor share
THEN = (4.41e12, {None: 786e12, "int8": 1428e12, "fp8": 1428e12})  # HBM and PEAKS of the first files' floors
ROUNDED = 6e-4  # of a floor: files have digits for that at least


def with_floors(document: Row) -> list[Row]:
    """The rows of a document, with the floors of today where they are others; none are while the limits are THEN's."""
    if (HBM, PEAKS) == THEN:
        return document["rows"]
    rule = RULES.get(module_of(document["command"]) or "")
    args = arguments_of(document["command"]) if rule else None
    if rule is None or args is None:
        return document["rows"]
    models: dict[tuple[Any, ...], Model] = {}
    floors: dict[tuple[Any, ...], Row] = {}
    found = []
    for row in document["rows"]:
        name = row.get("model") or getattr(args, "config", "").rpartition("/")[2].removesuffix(".json")
        path = CONFIGS / f"{name}.json"
        if not (SHARES.keys() & row.keys() and path.exists()):
            found.append(row)
            continue
        scheme = None if row.get("scheme", "bf16") in PLAIN else row["scheme"]
        if (name, scheme) not in models:
            config = load_config(path)
            layers = getattr(args, "layers", None)
            models[name, scheme] = shapes_of(config if layers is None else replace(config, num_layers=layers), scheme)
        case = (name, *(row.get(key) for key in CASE), "decode_ms" in row)
        if case not in floors:
            floors[case] = rule(row, models[name, scheme], args)
        found.append(row | changed(row, floors[case]))
    return found


def changed(row: Row, floors: Row) -> Row:
    """The floors that are others than the row's own, with shares of them."""
    found: Row = {}
    for key, floor in floors.items():
        if key in row and abs(floor / row[key] - 1) > ROUNDED:
            share, time = SHARES[key]
            time = time if time in row else "prefill_ms"
            found |= {key: floor} | ({share: floor / row[time]} if share in row else {})
    return rounded(found)


def kv_of(row: Row) -> str | None:
    return None if row["kv"] in PLAIN else row["kv"]


def of_throughput(row: Row, model: Model, args: Args) -> Row:
    floor, token = make_floor(model.params, model.config, args.bandwidth), token_bytes(model, kv_of(row))
    case = WholeBatch(row["batch"], row["input"], row["output"])
    prefill = sum(floor.of(work, token) for work in case.prefill(args.step_tokens).work(case))
    return {"prefill_floor_ms": 1e3 * prefill, "decode_floor_ms": 1e3 * floor.of(case.decode_work, token)}


def of_decode_step(row: Row, model: Model, args: Args) -> Row:
    keys = row["batch"] * decode_step.mean_length(args)
    seconds = decode_step.least_seconds(model.params, keys, token_bytes(model, kv_of(row)), args.bandwidth)
    return {"floor_ms": 1e3 * seconds / row.get("devices", 1)}


def of_quant_steps(row: Row, model: Model, args: Args) -> Row:
    kind = "decode" if "decode_ms" in row else "prefill"
    work = quant_steps.Case(row["scheme"], kind, row["batch"], row["kv"]).work(args.context, args.input)
    floor = make_floor(model.params, model.config, args.bandwidth)
    return {"floor_ms": 1e3 * floor.of(work, token_bytes(model, kv_of(row)))}


def of_qps(row: Row, model: Model, args: Args) -> Row:
    requests = qps.read_workload(args.workload, args.requests, args.rate, args.seed)
    names = ("page_size", "max_step_tokens", "kv_cache", *qps.MEMORY)
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    options = EngineOptions(max_slots=args.slots, **given)
    pages = int(row.get("pages_total") or qps.pages_of_h200(model, args.page_size, args.kv_cache, args.slots))
    limits = resolve(options, model.config, pages).limits
    floor, lengths = make_floor(model.params, model.config, args.bandwidth), [(r.prompt, r.output) for r in requests]
    return {"floor_s": workload_seconds(lengths, limits, floor, token_bytes(model, kv_of(row))) / (args.replicas or 1)}


RULES: dict[str, Callable[[Row, Model, Args], Row]] = {
    "experiments.throughput": of_throughput,
    "experiments.decode_step": of_decode_step,
    "experiments.quant_steps": of_quant_steps,
    "experiments.qps": of_qps,
}
