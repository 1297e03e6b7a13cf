"""What speculative decoding gains: how often drafts are accepted, and what verifying them costs.

    python -m experiments.speculation acceptance                    # the bundled model, its drafters, on any machine
    python -m experiments.speculation acceptance --drafters ngram --workloads repetitive --documents 4
    python -m experiments.speculation steps --config configs/llama-3-8b.json        # a GPU: what verifying drafts costs
    python -m experiments.speculation rejection --drafter copy:w4a16-g64
    python -m experiments.speculation draw experiments/results/speculation-*.json

Drafts change no token (docs/speculation.md), so all there is to measure is time. A part is a command of its own, with a
result of its own, and --help says what its columns mean.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.arguments import add_model_options, add_timing_options, known_scheme
from experiments.drafts import acceptance, rejection, steps
from experiments.drafts.pictures import draw
from experiments.drafts.workloads import WORKLOADS
from experiments.report.documents import read_result
from experiments.result_file import draw_all, record
from jllm.files.load import BUNDLED
from pallas_kernels.backends import OF_MODELS, on_hopper
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import non_negative_number, positive

Row = dict[str, Any]

ACCEPTANCE = """How often drafts are accepted on what a model says, one document at a time, and what that gains.

Each document is served by every engine in turn: without drafts, twice (the second tells what is noise); by each drafter
with a chain of --drafts wherever there can be one (fixed); and with drafts where they pay (automatic).

  tokens_a_step   that steps with drafts made of the sequence, the drawn one included
  acceptance      share of steps with a draft of this depth that accepted it; the mean over documents
  tokens_s        of all documents, prompts included
  times           a document's time without drafts over its time with: the median; _95: bootstrap over documents
  cpu_times       the same of processor seconds of all threads, which others on the machine disturb less
  same_tokens     documents whose tokens equal those without drafts; in float32 and bf16 a near-tie may fall otherwise

Stories begin as texts of experiments/texts do. After the repetitive prompts (versions of a text, lists, lines of code)
the bundled model repeats itself at temperature 0; it knows no editing, so at a temperature it does not."""


STEPS = """What it costs to verify drafts, by batch, context and rows a sequence (Q: the newest token and its drafts).

Random weights, and drafts that are accepted as often as it is imposed: every row is simulated, drafting is not in it.
Steps are timed as experiments.decode_step times them.

  over_plain             time of a step of Q rows over that of a plain step: the tokens that it must make to break even
  break_even_acceptance  of each draft where those before it were accepted; none where all drafts would not do
  times                  tokens a second over plain decoding's, with that number of imposed tokens a step
  times_here             what a published number of tokens a step gives by these times
  drafting_over_plain    time of a step that also drafts, with a quantized copy of the model, over that of a plain step
  times_at_0.9           what it gives where each of these drafts is accepted 9 times of 10
  tokens_needed          tokens a step by which these steps are as many times as fast as others were (their_times)"""


REJECTION = """How often drafts are accepted by rejection sampling, beside equality with the target's own draw.

  accepted   share of a draft model's drafts, one after each token of the target's own texts; _95: bootstrap"""


@dataclass(frozen=True)
class Part:
    """A command: its rows, and the bars that they are held against."""

    about: str
    add_options: Callable[[argparse.ArgumentParser], None]
    rows: Callable[[argparse.Namespace], Iterator[Row]]
    bars: Callable[[Sequence[Row]], Iterator[Row]]
    label: Callable[[argparse.Namespace], str] = lambda args: ""


def add_acceptance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=BUNDLED, help="directory or id (default: the bundled model)")
    drafters = list(acceptance.DRAFTERS)
    parser.add_argument("--drafters", nargs="+", default=drafters, metavar="NAME", help="as --speculate has them")
    parser.add_argument("--drafts", type=positive, help=f"of a fixed chain (default: {acceptance.DRAFTERS})")
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="that prompts are from"
    )
    parser.add_argument(
        "--temperatures", nargs="+", type=non_negative_number, default=[0.0, 0.7, 1.0], metavar="T", help="of draws"
    )
    parser.add_argument("--documents", type=positive, default=8, help="of each workload (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=positive, nargs=2, default=[64, 192], metavar="N", help="of stories, and others"
    )
    parser.add_argument("--backend", choices=OF_MODELS, help="default: chosen for the device")


def add_steps(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, scheme=False)
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 16, 64], help="sequences in a step")
    parser.add_argument("--context", type=positive, nargs="+", default=[136, 1024], help="tokens before each step")
    parser.add_argument("--rows", type=positive, nargs="+", default=[2, 4, 8], metavar="Q", help="of a sequence")
    parser.add_argument(
        "--copies", type=known_scheme, nargs="+", default=[], metavar="SCHEME", help="that draft as copy:SCHEME (none)"
    )
    parser.add_argument("--backend", choices=OF_MODELS, help="default: chosen for the device")
    add_timing_options(parser, steps=20, repeats=3)
    parser.add_argument("--threads", type=positive, default=12, help="that compile at once")


def steps_label(args: argparse.Namespace) -> str:
    return Path(args.config).stem


def step_bars(rows: Sequence[Row]) -> Iterator[Row]:
    """On a GPU alone, for which they are stated."""
    return steps.bars(rows) if on_hopper() else iter(())


def add_rejection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=BUNDLED, help="directory or id (default: the bundled model)")
    parser.add_argument("--documents", type=positive, default=8, help="beginnings of stories (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=48, help="of each document (default: %(default)s)")
    parser.add_argument("--drafter", default="draft", help="a draft model, or copy:SCHEME (default: %(default)s)")
    parser.add_argument("--backend", choices=OF_MODELS, help="default: chosen for the device")


PARTS = {
    "acceptance": Part(ACCEPTANCE, add_acceptance, acceptance.rows, acceptance.bars),
    "steps": Part(STEPS, add_steps, steps.rows, step_bars, steps_label),
    "rejection": Part(REJECTION, add_rejection, rejection.rows, lambda rows: iter(())),
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, prog="python -m experiments.speculation")
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, part in PARTS.items():
        each = parts.add_parser(name, help=part.about.partition("\n")[0], description=part.about)
        part.add_options(each)
        add_result_options(each)
    drawing = parts.add_parser("draw", help="draw results as SVG beside them (needs matplotlib)")
    drawing.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a result of any part")
    return parser.parse_args(argv)


def name_of(args: argparse.Namespace) -> str:
    """Returns what a result is called."""
    return "-".join(filter(None, ["speculation", args.part, PARTS[args.part].label(args)]))


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse_args(words)
    if args.part == "draw":
        return draw_all(args.files, lambda path: draw(read_result(path), path.with_suffix(".svg")))
    part = PARTS[args.part]
    command = ["python", "-m", "experiments.speculation", *words]
    return record(args, name_of(args), command, part.rows(args), bars=part.bars)


if __name__ == "__main__":
    sys.exit(main())
