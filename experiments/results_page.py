"""The pages of results, from the files of experiments/results and nothing else.

    python -m experiments.results_page           # --check writes nothing, and says whether they are what it would write

experiments/RESULTS.md has everything in short: steps, requests, kernels and accuracy against peers, claims and how bars
stand (report/asked.py). Pages of details, results/steps.md, kernels.md, accuracy.md and claims.md, have each
experiment's newest file: what was asked, bars, rows, versions and command; results/devices.md has steps and requests of
every device, results/behind.md what further results miss, and which are stale. Bars, shares of floors and verdicts of
claims are what rows say by the limits and rules of today (report/judged.py). Pictures need matplotlib (the extra
`notebooks`).
"""

import sys
from pathlib import Path

from experiments.report import behind, by_device
from experiments.report.details import pages
from experiments.report.documents import RESULTS, read_all
from experiments.report.figures import Results
from experiments.report.overview import overview
from experiments.report.pictures import draw_all
from jllm.errors import InputFileError
from pallas_kernels.bench.command import Parser, interruptible

PAGE = Path(__file__).parent / "RESULTS.md"


def texts(directory: Path = RESULTS) -> dict[Path, str]:
    """The text of RESULTS.md and of each page of details, by its path."""
    entries = read_all(directory)
    details = {directory / f"{name}.md": text for name, text in pages(entries).items()}
    results = Results(entries)
    standing = {directory / "devices.md": by_device.page(results), directory / "behind.md": behind.page(results)}
    return {PAGE: overview(results)} | standing | details


@interruptible
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is another")
    args = parser.parse_args(argv)
    try:
        found = texts(RESULTS)
    except InputFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.check:
        stale = [path.name for path, text in found.items() if not path.exists() or path.read_text("utf-8") != text]
        said = f"stale: {', '.join(stale)}: python -m experiments.results_page" if stale else "what the results say"
        print(f"the pages are {said}")
        return 1 if stale else 0
    for path, text in found.items():
        path.write_text(text, encoding="utf-8")
    try:
        draw_all(Results(read_all()), RESULTS)
    except ImportError:
        print("error: no pictures: matplotlib is missing (the extra `notebooks`)", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
