"""Measures the gain of speculative decoding: how often drafts are accepted, and the cost of verifying them.

    python -m experiments.speculation acceptance                    # the bundled model, its drafters, on any machine
    python -m experiments.speculation acceptance --drafters ngram --workloads repetitive --documents 4
    python -m experiments.speculation steps --config configs/llama-3-8b.json        # a GPU: the cost of verifying
    python -m experiments.speculation rejection --drafter copy:w4a16-g64

Drafts change no token (docs/speculation.md), so only time can be measured. Each part is a command with its own result;
its --help explains the columns.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.arguments import add_model_options, add_timing_options, known_scheme
from experiments.drafts import acceptance, rejection, steps
from experiments.drafts.workloads import WORKLOADS
from experiments.result_file import record
from jllm.files.load import BUNDLED
from pallas_kernels.backends import OF_MODELS, on_hopper
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import non_negative_number, positive

Row = dict[str, Any]

ACCEPTANCE = """Measures how often drafts are accepted on the model's own texts, one document at a time, and the gain.

Every engine serves each document in turn. One has no drafts, and comes twice, which shows the noise. Each drafter has
an engine that always drafts a chain of --drafts (fixed), and one that drafts if it pays (automatic).

  tokens_a_step   tokens per step with drafts, the drawn one included
  acceptance      share of steps with a draft of this depth that accepted it, as a mean over documents
  tokens_s        tokens per second of all documents, prompts included
  times           median of a document's time without drafts over its time with; _95: bootstrap over documents
  cpu_times       the same for processor seconds of all threads, which other load disturbs less
  same_tokens     documents with the same tokens as without drafts; in float32 and bf16 a near-tie may differ

Stories begin like texts of experiments/texts. After the repetitive prompts (versions of a text, lists, lines of code)
the bundled model repeats itself at temperature 0. It cannot edit, so at higher temperature it does not."""


STEPS = """Measures the cost of verifying drafts, by batch, context and rows per sequence (Q: newest token and drafts).

Weights are random and acceptance is imposed. So every row is simulated, and drafting is not included. Steps are timed
like experiments.decode_step's.

  over_plain             time of a step of Q rows over a plain step's: the tokens that it must make to break even
  break_even_acceptance  of each draft, if all before it were accepted; none if all drafts together are too few
  times                  tokens per second over plain decoding's, with that number of imposed tokens per step
  drafting_over_plain    time of a step that also drafts, with a quantized copy of the model, over a plain step's
  times_at_0.9           the same gain if each of these drafts is accepted 9 times of 10"""


REJECTION = """Measures how often rejection sampling accepts drafts, beside equality with the target's own draw.

  accepted   accepted share of a draft model's drafts after each token of the target's own texts; _95: bootstrap"""


@dataclass(frozen=True)
class Part:
    """A command: its rows and their bars."""

    about: str
    add_options: Callable[[argparse.ArgumentParser], None]
    rows: Callable[[argparse.Namespace], Iterator[Row]]
    bars: Callable[[Sequence[Row]], Iterator[Row]]
    label: Callable[[argparse.Namespace], str] = lambda args: ""


def add_acceptance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=BUNDLED, help="directory or id (default: the bundled model)")
    drafters = list(acceptance.DRAFTERS)
    parser.add_argument("--drafters", nargs="+", default=drafters, metavar="NAME", help="drafters, as for --speculate")
    parser.add_argument("--drafts", type=positive, help=f"drafts of a fixed chain (default: {acceptance.DRAFTERS})")
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="workloads of the prompts"
    )
    parser.add_argument(
        "--temperatures",
        nargs="+",
        type=non_negative_number,
        default=[0.0, 0.7, 1.0],
        metavar="T",
        help="temperatures of sampling",
    )
    parser.add_argument(
        "--documents", type=positive, default=8, help="documents of each workload (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=positive, nargs=2, default=[64, 192], metavar="N", help="temperatures of stories, and others"
    )
    parser.add_argument("--backend", choices=OF_MODELS, help="backend (default: chosen for the device)")


def add_steps(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, scheme=False)
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 16, 64], help="sequences in a step")
    parser.add_argument("--context", type=positive, nargs="+", default=[136, 1024], help="tokens before each step")
    parser.add_argument(
        "--rows", type=positive, nargs="+", default=[2, 4, 8], metavar="Q", help="numbers of rows per sequence"
    )
    parser.add_argument(
        "--copies",
        type=known_scheme,
        nargs="+",
        default=[],
        metavar="SCHEME",
        help="schemes of drafters copy:SCHEME (default: none)",
    )
    parser.add_argument("--backend", choices=OF_MODELS, help="backend (default: chosen for the device)")
    add_timing_options(parser, steps=20, repeats=3)
    parser.add_argument("--threads", type=positive, default=12, help="number of threads that compile")


def steps_label(args: argparse.Namespace) -> str:
    return Path(args.config).stem


def step_bars(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields the bars of steps, which only apply to a GPU."""
    return steps.bars(rows) if on_hopper() else iter(())


def add_rejection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=BUNDLED, help="directory or id (default: the bundled model)")
    parser.add_argument(
        "--documents", type=positive, default=8, help="number of beginnings of stories (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=positive, default=48, help="tokens of each document (default: %(default)s)")
    parser.add_argument(
        "--drafter", default="draft", help="drafter: a draft model, or copy:SCHEME (default: %(default)s)"
    )
    parser.add_argument("--backend", choices=OF_MODELS, help="backend (default: chosen for the device)")


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
    return parser.parse_args(argv)


def name_of(args: argparse.Namespace) -> str:
    """Returns a result's name."""
    return "-".join(filter(None, ["speculation", args.part, PARTS[args.part].label(args)]))


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse_args(words)
    part = PARTS[args.part]
    command = ["python", "-m", "experiments.speculation", *words]
    return record(args, name_of(args), command, part.rows(args), bars=part.bars)


if __name__ == "__main__":
    sys.exit(main())
