"""C32: below about 100 billion parameters a decode step stays under 50 ms.

Estimated: meshes of 1 to 8 H200s or H100s by experiments.meshes (`mesh`: their exchange is extrapolated beyond two),
and one device alone of every other kind that runs kernels of ours, by experiments.hardware (`alone`). Weights, K and V
are in bf16. Of each model and device that has room, `one_ms` is a step of one sequence, `full_ms` one of the largest
batch that nine tenths of the memory hold, up to 1,024, and `batch_50ms` the largest batch whose step is under 50 ms.
LLaMA-3.1-405B is there for what is beyond 100 billion parameters.

`check` rows are steps that were measured, with 16-bit weights on one H100 or H200, on two, and on four H100s, and what
would have been estimated. Their largest errors are the margins: a step is under 50 ms if it is so with the one added,
not under it if it is not even with the other taken off, and open between.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from experiments.claims.claim import Claim, Part, Row, Verdict, verdict_of
from experiments.hardware import backend_of, shares_by_backend
from experiments.meshes import BATCHES, EXCHANGE, LINK, Mesh, checks
from experiments.other_devices import MEMORY_SHARE, cost_on
from experiments.report.documents import short
from experiments.result_file import rounded
from experiments.steps.cost_model import CONFIGS, CostModel, shapes_of
from experiments.steps.devices import device_sheets
from experiments.steps.floors import step_work
from experiments.steps.links import read_link
from jllm.config import load_config
from jllm.fit import tree_bytes
from jllm.parallel.mesh import fitting

MODELS = (
    "llama-2-7b",
    "llama-2-13b",
    "qwen3-32b",
    "llama-33b",
    "llama-65b",
    "llama-2-70b",
    "qwen2-72b",
    "llama-3.1-405b",
)
MESHES = ("h200-sxm", "h100-sxm")
CONTEXTS = (1024, 8192)
STATED_MS, STATED_BILLIONS = 50.0, 100.0


def measure(toy: bool) -> Iterator[Row]:
    yield from (row for row in checks() if row["scheme"] == "bf16")
    link, shares = read_link(LINK), shares_by_backend()
    alone = [(sheet, backend_of(sheet)) for stem, sheet in device_sheets().items() if stem not in MESHES]
    for name in MODELS[:1] if toy else MODELS:
        config = load_config(CONFIGS / f"{name}.json")
        model = shapes_of(config)
        weights = tree_bytes(model.params)
        about: Row = {"model": name, "billions": round(weights / 2e9, 1)}  # parameters of two bytes
        for device in MESHES:
            for ranks in [n for n in (1, 2, 4, 8) if n in fitting(config)]:
                mesh = Mesh(config, ranks, None, None, link, EXCHANGE, device)
                at: Row = {"part": "mesh", "device": mesh.sheet.name, "ranks": ranks}
                yield from steps(at | about, mesh.seconds, mesh.fits)
        for sheet, backend in alone:
            if backend != "xla":
                device_cost = Alone(cost_on(sheet, model, shares[backend]), weights, MEMORY_SHARE * sheet.memory)
                at = {"part": "alone", "device": sheet.name, "ranks": 1}
                yield from steps(at | about, device_cost.seconds, device_cost.fits)


@dataclass(frozen=True)
class Alone:
    """The costs of a model on one device, as Mesh has them."""

    cost: CostModel
    weights: int  # bytes
    memory: float  # bytes that may be used

    def seconds(self, batch: int, context: int) -> float:
        return self.cost.seconds(step_work(batch, batch * (context + 1)))

    def fits(self, batch: int, context: int) -> bool:
        return self.weights + batch * (context + 1) * self.cost.token_bytes <= self.memory


def steps(about: Row, seconds: Callable[[int, int], float], fits: Callable[[int, int], bool]) -> Iterator[Row]:
    """A row a length, with seconds(batch, context) of one sequence and of the largest batch that fits; none where none
    does."""
    for context in CONTEXTS:
        held = [batch for batch in BATCHES if fits(batch, context)]
        if held:
            ms = {batch: 1e3 * seconds(batch, context) for batch in held}
            in_time = max((batch for batch in held if ms[batch] < STATED_MS), default=0)
            row = {"source": "estimated", "context": context, "one_ms": ms[1], "batch_50ms": in_time}
            yield rounded(about | row | {"full_batch": held[-1], "full_ms": ms[held[-1]]})


def judge(rows: list[Row]) -> Verdict:
    """Of models below STATED_BILLIONS, between the most that measured steps took over their estimates and the least."""
    checks = [row["measured_ms"] / row["estimated_ms"] for row in rows if row["part"] == "check"]
    found = [row for row in rows if row["part"] != "check"]
    margin, least = max(1.0, *checks), min(1.0, *checks)
    parts = []
    for key, what in (("one_ms", "one sequence"), ("full_ms", "a full memory")):
        for part, where in (("mesh", "on meshes"), ("alone", "on one device")):
            some = [row for row in found if row["part"] == part and row["billions"] < STATED_BILLIONS]
            under: dict[bool | None, list[Row]] = {
                True: [row for row in some if row[key] * margin < STATED_MS],
                False: [row for row in some if row[key] * least >= STATED_MS],
            }
            under[None] = [row for row in some if not (row in under[True] or row in under[False])]
            for side, found_so in under.items():
                most = max((row[key] for row in found_so), default=0.0) * margin
                devices = "" if side else f" ({', '.join(dict.fromkeys(short(row['device']) for row in found_so))})"
                said = f"{what} {where} in {len(found_so)} of {len(some)} cases, at most {most:.3g} ms{devices}"
                parts += [Part(said, side)] * bool(found_so)
    large = [row for row in found if row["part"] == "mesh" and row["billions"] >= STATED_BILLIONS]
    error = (
        f"with {margin - 1:.0%} added, the most that one of {len(checks)} steps measured on one to four H100s and "
        f"one and two H200s, at short contexts, took over its estimate; one took {1 - least:.0%} less"
    )
    return verdict_of(parts, error, *(of_mesh(row, margin) for row in large), how="Estimated")


def of_mesh(row: Row, margin: float) -> str:
    where = f"{row['model']} on {row['ranks']} {short(row['device'])} at {row['context']} keys"
    one, full = row["one_ms"] * margin, row["full_ms"] * margin
    return f"{where}: {one:.0f} ms for one sequence, {full:.0f} for {row['full_batch']}"


def draw(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    found = [row for row in rows if row["part"] != "check"]
    devices = list(dict.fromkeys(row["device"] for row in found))
    for i, device in enumerate(devices):
        some = [row for row in found if row["device"] == device]
        for key, marker in (("one_ms", "|"), ("full_ms", ".")):
            for large, color in ((False, "#0b62c4"), (True, "#d1495b")):
                ms = [row[key] for row in some if (row["billions"] >= STATED_BILLIONS) == large]
                axes.plot(ms, [i] * len(ms), marker, color=color, markersize=7)
    axes.plot([], [], "|", color="#0b62c4", label="one sequence")
    axes.plot([], [], ".", color="#0b62c4", label="a full memory")
    axes.plot([], [], ".", color="#d1495b", label="405 billion parameters")
    axes.axvline(STATED_MS, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(devices)), [short(device) for device in devices], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("ms a decode step, estimated: every model, mesh and length")
    axes.legend(fontsize=7)


CLAIM = Claim(
    id="C32",
    rule=(
        f"In each case under {STATED_MS:g} ms with the most added that a measured step took over its estimate; not "
        "under it where it is not even with the most taken off that one took less; open between."
    ),
    stated="below about 100 billion parameters a decode step stays under 50 ms",
    measure=measure,
    judge=judge,
    draw=draw,
    computed=True,
)
