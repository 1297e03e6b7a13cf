"""Floors of a result's rows by the limits of today, whatever they were when it was measured.

A share of a floor is the floor over a time, and only the time was measured. So each floor is computed again, from its
row's model, batch and lengths, the options of its command and the ceilings of its device, and its share with it. Rows
of models that configs/ does not have keep what they have, as do those of commands with options that are gone.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from experiments import decode_step, quant_steps
from experiments.report.commands import arguments_of, module_of
from experiments.result_file import rounded
from experiments.serving.engines import MEMORY, pages_of_h200
from experiments.serving.workload import read_workload
from experiments.steps.batches import WholeBatch
from experiments.steps.cost_model import CONFIGS, shapes_of
from experiments.steps.devices import Ceilings, ceilings_of
from experiments.steps.floors import Work, make_floor, schedule, step_work, token_bytes
from jllm.config import load_config
from jllm.engine.options import EngineOptions, resolve
from jllm.pretrained import Model

Row = dict[str, Any]
Args = argparse.Namespace
Works = Mapping[str, Iterable[Work]]  # the steps that a row's floor adds up, by the floor's name
PLAIN = ("bf16", "bfloat16")
SHARES = {  # floor -> its share, and what that is of
    "decode_floor_ms": ("floor_fraction", "decode_ms"),
    "prefill_floor_ms": ("prefill_floor_fraction", "prefill_ms"),
    "floor_s": ("floor_fraction", "seconds"),
    "floor_ms": ("floor_fraction", "decode_ms"),
}
CASE = ("model", "scheme", "kv", "batch", "input", "output", "devices", "pages_total")  # rows alike have one floor


def with_floors(document: Row) -> list[Row]:
    """The rows of a document with the floors of today; the document's own where it has none that can be computed."""
    rule = RULES.get(module_of(document["command"]) or "")
    args = arguments_of(document["command"]) if rule else None
    if rule is None or args is None:
        return document["rows"]
    layers = getattr(args, "layers", None)
    ceilings = ceilings_read(document)

    @cache
    def model_of(name: str, scheme: str | None) -> Model:
        config = load_config(CONFIGS / f"{name}.json")
        return shapes_of(config if layers is None else replace(config, num_layers=layers), scheme)

    found, known = [], {}
    for row in document["rows"]:
        name = row.get("model") or getattr(args, "config", "").rpartition("/")[2].removesuffix(".json")
        if SHARES.keys() & row.keys() and (CONFIGS / f"{name}.json").exists():
            case = (*(row.get(key) for key in CASE), "decode_ms" in row)
            if case not in known:
                scheme = row.get("scheme", "bf16")
                known[case] = floors_of(row, model_of(name, None if scheme in PLAIN else scheme), rule, ceilings, args)
            row = row | shares_of(row, known[case])
        found.append(row)
    return found


def ceilings_read(document: Row) -> Ceilings:
    """Those of the device that made a document, with the bandwidth that its command asked for."""
    return ceilings_of(document["device"], getattr(arguments_of(document["command"]), "bandwidth", None))


def floors_of(row: Row, model: Model, rule: Callable[[Row, Model, Args], Works], ceilings: Ceilings, args: Args) -> Row:
    """A row's floors, by their names."""
    floor = make_floor(model.params, model.config, ceilings)
    token = token_bytes(model, None if row["kv"] in PLAIN else row["kv"])
    sharers = row.get("devices") or 1  # each of several replicas has the workload
    seconds = {name: sum(floor.of(w, token) for w in works) / sharers for name, works in rule(row, model, args).items()}
    return {name: each if name.endswith("_s") else 1e3 * each for name, each in seconds.items()}


def shares_of(row: Row, floors: Row) -> Row:
    """Floors that the row has, and its shares of them."""
    found: Row = {}
    for name in floors.keys() & row.keys():
        share, time = SHARES[name]
        found |= {name: floors[name]}
        if share in row:
            found |= {share: floors[name] / row[time if time in row else "prefill_ms"]}
    return rounded(found)


def of_throughput(row: Row, model: Model, args: Args) -> Works:
    case = WholeBatch(row["batch"], row["input"], row["output"])
    return {"prefill_floor_ms": case.prefill(args.step_tokens).work(case), "decode_floor_ms": [case.decode_work]}


def of_decode_step(row: Row, model: Model, args: Args) -> Works:
    return {"floor_ms": [step_work(row["batch"], row["batch"] * decode_step.mean_length(args))]}


def of_quant_steps(row: Row, model: Model, args: Args) -> Works:
    kind = "decode" if "decode_ms" in row else "prefill"
    return {"floor_ms": [quant_steps.Case(row["scheme"], kind, row["batch"], row["kv"]).work(args.context, args.input)]}


def of_qps(row: Row, model: Model, args: Args) -> Works:
    requests = read_workload(args.workload, args.requests, args.rate, args.seed)
    names = ("page_size", "max_step_tokens", "kv_cache", *MEMORY)
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    pages = int(row.get("pages_total") or 0) // row.get("replicas", 1) or pages_of_h200(
        model, args.page_size, args.kv_cache, args.slots
    )
    limits = resolve(EngineOptions(max_slots=args.slots, **given), model.config, pages).limits
    return {"floor_s": schedule([(r.prompt, r.output) for r in requests], limits)}


RULES: dict[str, Callable[[Row, Model, Args], Works]] = {
    "experiments.throughput": of_throughput,
    "experiments.decode_step": of_decode_step,
    "experiments.quant_steps": of_quant_steps,
    "experiments.qps": of_qps,
}
