"""The result file of a run of tests: how many passed, failed and were skipped, by file, and which failed."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.bench.gpus import ask_gpus
from pallas_kernels.bench.result_file import ResultFile

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")  # error: a fixture's failure


def write(
    directory: str, command: Sequence[str], reports: Mapping[str, Iterable[Any]], seconds: float, whole: bool
) -> Path:
    """`reports` are pytest's, by outcome; `whole`: nothing cut the run off."""
    files: dict[str, Counter[str]] = defaultdict(Counter)
    took: Counter[str] = Counter()
    for outcome in OUTCOMES:
        for report in reports.get(outcome, ()):
            file = report.nodeid.partition("::")[0]
            files[file][outcome] += 1
            took[file] += getattr(report, "duration", 0.0)  # a module that is skipped has none
    total = sum(files.values(), Counter())
    failures = [report.nodeid for outcome in ("failed", "error") for report in reports.get(outcome, ())]
    driver = next((gpu[0] for gpu in ask_gpus("driver_version")), None)
    counts = {outcome: total[outcome] for outcome in OUTCOMES[:4]}
    with ResultFile(directory, "tests", command, driver=driver, **counts, seconds=round(seconds)) as result:
        for file, found in sorted(files.items()):
            result.add({"file": file} | {o: found[o] for o in OUTCOMES if found[o]} | {"seconds": round(took[file], 1)})
        result.finish(bars=[], complete=whole, failures=failures)
    return result.path


class Reasons:
    """A plugin that says why a test failed as soon as it has: a run that is cut off comes to no summary."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\n{report.nodeid}: {reason(report)}")  # its dot ends no line


def reason(report: Any) -> str:
    """The first line of the error, or the last of what was printed where there is no more."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = crash.message.splitlines() if crash else str(report.longrepr).strip().splitlines()[::-1]
    return lines[0] if lines else "no reason was given"
