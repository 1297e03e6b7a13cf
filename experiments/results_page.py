"""Writes the page of results, from the newest file of each name and device in experiments/results.

    python -m experiments.results_page           # writes experiments/RESULTS.md and its pictures
    python -m experiments.results_page --check   # writes nothing, and reports if the page differs

Claims and bars have the verdicts in their files, which are those of their day. Pictures need matplotlib (the extra
`notebooks`).
"""

import sys
from pathlib import Path

from experiments.report.documents import RESULTS, read_all
from experiments.report.figures import Results
from experiments.report.page import page
from experiments.report.pictures import draw_all
from jllm.errors import InputFileError
from pallas_kernels.bench.command import Parser, interruptible

PAGE = Path(__file__).parent / "RESULTS.md"


@interruptible
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the page differs")
    args = parser.parse_args(argv)
    try:
        results = Results(read_all(RESULTS))
    except InputFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = page(results)
    if args.check:
        same = PAGE.exists() and PAGE.read_text("utf-8") == text
        print(f"{PAGE.name} is {'what the results say' if same else 'stale: python -m experiments.results_page'}")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    try:
        draw_all(results, RESULTS)
    except ImportError:
        print("error: no pictures: matplotlib is missing (the extra `notebooks`)", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
