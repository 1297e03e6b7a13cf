"""Holds what scripts of other systems share: packages, options, timing on a GPU, workloads and the JSON of rows."""

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PACKAGES = "PEER_PACKAGES"  # the variable with folders or archives of packages, in the form of PATH
NO_GPU = "no GPU: peers are timed on a CUDA device"
UNPACKED = Path(tempfile.gettempdir()) / "peer_packages"
LLAMA_2_7B = Path(__file__).parents[2] / "configs" / "llama-2-7b.json"


class Missing(Exception):
    """A script lacks something that it needs."""


def parser(doc: str, seconds: float) -> argparse.ArgumentParser:
    """Returns the options of every script. `seconds` is the default limit of its measurements."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help="JSON file to write (default: none)")
    made.add_argument(
        "--budget-s", "--budget", type=float, default=seconds, help=f"limit in seconds (default: {seconds:g})"
    )
    return made


def command(run: Callable[[argparse.Namespace], None], options: argparse.ArgumentParser) -> int:
    """Runs a script, and prints one line if it lacks something."""
    started()
    args = options.parse_args()
    try:
        run(args)
    except (Missing, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def load(name: str, requirement: str) -> Any:
    """Imports a peer, from PEER_PACKAGES if it is not installed. Raises Missing with what to install."""
    find(name)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        why = "" if error.name == name else f" ({error})"
        raise Missing(f"{name} cannot be imported{why}: pip install {requirement}") from None


def load_torch(requirement: str = "torch==2.11.0") -> Any:
    """Imports torch. Raises Missing if there is no torch or no GPU."""
    torch = load("torch", requirement)
    if not torch.cuda.is_available():
        raise Missing(NO_GPU)
    torch.manual_seed(0)
    return torch


def find(name: str) -> bool:
    """Returns whether a package can be imported. Adds its folder in PEER_PACKAGES to the path."""
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return True
    for given in filter(None, os.environ.get(PACKAGES, "").split(os.pathsep)):
        path = Path(given)
        archives = sorted(path.glob("*.tar.*"), key=lambda each: each.stat().st_size) if path.is_dir() else [path]
        for folder in [path, *archives]:
            root = folder if folder.is_dir() else unpacked(folder)
            for site in (root, *sorted(each for each in root.iterdir() if each.is_dir())):
                if (site / name / "__init__.py").is_file():
                    sys.path.insert(0, str(site))
                    others = filter(None, [os.environ.get("PYTHONPATH")])
                    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *others])  # for engines' own processes
                    importlib.invalidate_caches()
                    return True
    return False


def unpacked(archive: Path) -> Path:
    """Unpacks an archive once, whole or not at all, and returns its folder."""
    if not archive.is_file():
        raise Missing(f"{PACKAGES}: there is no {archive}")
    folder = UNPACKED / archive.name.partition(".tar")[0]
    if not folder.is_dir():
        UNPACKED.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=UNPACKED))
        with tarfile.open(archive) as packed:
            packed.extractall(temporary, filter="data")
        try:
            temporary.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(temporary)
    return folder


def versions_of(*packages: str) -> str:
    """Returns the packages with their versions, as rows name them."""
    return ", ".join(f"{name} {_version(name)}" for name in packages)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(name), "__version__", "of unknown version"))


class Output:
    """The rows of a script. They are written with each new one, so a run that is cut off keeps them."""

    def __init__(self, path: Path | None, versions: str) -> None:
        self.path, self.rows = path, list[Row]()
        self.document: Row = {"versions": versions, "rows": self.rows}

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.document, indent=1), encoding="utf-8")

    def attempt(self, about: Row, measure: Callable[[], Row]) -> None:
        """Adds a row with a measurement, or with its error."""
        try:
            self.add(about | measure())
        except Exception as error:  # loses only this variant's row
            self.add(about | {"error": said(error)})


def said(error: BaseException) -> str:
    """Returns an error in one short line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def read_workload(path: Path) -> list[Row]:
    """Returns requests with prompt_len, output_len and arrival in seconds. Raises ValueError for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [
            {"prompt_len": int(r["prompt_len"]), "output_len": int(r["output_len"]), "arrival": r.get("arrival", 0.0)}
            for r in found
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: must be a JSON list of objects with prompt_len and output_len ({said(error)})"
        ) from None


def by_commas(text: str) -> list[str]:
    """Returns the parts of an option's value."""
    return [part for part in text.split(",") if part]


def graph_us(torch: Any, calls: Sequence[Callable[[], Any]], seconds: float = 0.05) -> float:
    """Returns the microseconds of one call: the median of replays of a CUDA graph with each call in turn.

    Calls differ in their operands, which together exceed the L2 cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    rounds = max(1, -(-8 // len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls] * rounds:
            call()
    graph.replay()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 1e3 * seconds and len(times) < 15):
        times.append(event_ms(torch, graph.replay))
    return 1e3 * sorted(times)[len(times) // 2] / (rounds * len(calls))


def event_ms(torch: Any, call: Callable[[], Any]) -> float:
    """Returns the milliseconds of one call by CUDA's events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def copies_of(nbytes: int, most: int = 64) -> int:
    """Returns how many operands of this size take three times an L2 cache of 60 MB."""
    return int(min(most, max(2, -(-180_000_000 // nbytes))))


@functools.cache
def started() -> float:
    """Returns the time of the first call, which is a script's start."""
    return time.monotonic()


def seconds_left(args: argparse.Namespace) -> float:
    """Returns what is left of a script's seconds."""
    return float(args.budget_s) - (time.monotonic() - started())
