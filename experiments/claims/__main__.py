"""Tests claims, and prints a table and a verdict for each.

    python -m experiments.claims C5 C21 C22 [--json]
    python -m experiments.claims C6 C9 C10 C15 --model DIR --text mine.txt --label mine  # of your own model

Each claim writes claims-ID-YYYYMMDD-DEVICE.json into the results directory, with its rows and its verdict. A verdict
has two answers. The direction tells whether the claimed effect exists. The size tells whether it is as large as stated.
Either is open if noise leaves it open.

A claim about a kernel needs a Hopper GPU. A claim that is computed or simulated gives the same verdict on any machine.
Others run on a CPU at toy size. That shows how the figures arise, and gives no verdict.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from experiments.arguments import claim_memory
from experiments.claims.accuracy import BUNDLED_SUBJECT, Subject
from experiments.claims.claim import Claim, Row, text_table
from experiments.claims.registry import TITLES, find
from experiments.claims.run import run
from experiments.result_file import ResultFile, command_line
from jllm.errors import JllmError
from pallas_kernels.backends import on_hopper
from pallas_kernels.bench.command import Parser, add_result_options, interruptible
from pallas_kernels.bench.numbers import positive_number


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    known = "\n".join(f"  {name:4} {title}" for name, title in TITLES.items())
    parser = Parser(__doc__, prog="python -m experiments.claims", epilog=f"claims:\n{known}")
    parser.add_argument("claims", nargs="+", metavar="CLAIM", help="claims to test, from the list below")
    parser.add_argument("--toy", action="store_true", help="use toy size even on a GPU, for a trial")
    parser.add_argument(
        "--seconds", type=positive_number, help="seconds of arrivals at each load (default: the claim's)"
    )
    parser.add_argument(
        "--loads",
        nargs="+",
        type=positive_number,
        default=[],
        metavar="SHARE",
        help="rising loads, as shares of the throughput of all requests at once; they end once too few requests are"
        " in time (default: the claim's)",
    )
    parser.add_argument("--model", help="directory or Hub id of your own model (default: the bundled model)")
    parser.add_argument("--text", type=Path, help="UTF-8 text, or .jsonl of documents, for --model")
    add_result_options(parser)
    args = parser.parse_args(argv)
    if args.toy:
        parser.refuse(("seconds", "loads"), "{} is for claims at full size: --toy has a few requests")
    if (args.model is None) != (args.text is None):
        parser.error("--model and --text belong together: what a model loses is measured on a text that suits it")
    if args.model is not None and args.label is None:
        parser.error("--model needs a --label: its result is not to stand for the bundled model's")
    return args


def check_device(claim: Claim) -> None:
    """Raises ValueError if this machine cannot test the claim."""
    if claim.hopper and not on_hopper():
        import jax

        device = jax.devices()[0].device_kind
        raise ValueError(f"{claim.id} needs a Hopper GPU, whose kernel it is about, and this machine has: {device}")


def conclusion(document: Row, toy: bool) -> str:
    """Returns a verdict in words, or the reason for having none."""
    if (verdict := document.get("verdict")) is None:
        return "toy size: no verdict" if toy else "incomplete: no verdict"
    said = f"stated: {verdict['stated']}; measured: {verdict['measured']}"
    return f"{said}; direction: {verdict['direction']}; size: {verdict['size'] or 'none stated'}\n{verdict['line']}"


def test(claims: Sequence[Claim], args: argparse.Namespace, command: list[str]) -> list[Row]:
    """Tests claims side by side, and returns a document for each."""
    toy = args.toy or not (all(claim.computed for claim in claims) or on_hopper())
    subject = BUNDLED_SUBJECT if args.model is None else Subject(args.model, args.text)
    tested = []
    with ExitStack() as stack:
        for claim in claims:
            print(f"{claim.id}: {TITLES[claim.id]}{' (toy size)' if toy else ''}", file=sys.stderr)
            size = "toy" if toy else "full"
            result = ResultFile(args.results, f"claims-{claim.id}", command, args.label, size=size)
            tested.append((claim, stack.enter_context(result)))
        run(tested, toy, lambda line: print(line, file=sys.stderr, flush=True), args.seconds, subject, args.loads)
    for claim, result in tested:
        print(f"{claim.id}: {TITLES[claim.id]}\n\n{text_table(result.document['rows'])}\n")
        print(f"{conclusion(result.document, toy)}\n", flush=True)
    return [result.document for _, result in tested]


def side_by_side(claims: Iterable[Claim]) -> list[list[Claim]]:
    """Returns claims in groups. Claims whose rows are rounds of the same runs share a group."""
    found: dict[str, list[Claim]] = {}
    for claim in claims:
        found.setdefault("rounds" if claim.alternates else claim.id, []).append(claim)
    return list(found.values())


@interruptible
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = command_line("claims", argv)
    try:
        claims = [find(name) for name in dict.fromkeys(args.claims)]
        if args.seconds is not None and (brief := [claim.id for claim in claims if not claim.lasts]):
            raise ValueError(
                f"--seconds has no meaning for {', '.join(brief)}, at whose loads nothing arrives by a clock"
            )
        if args.loads and (other := [claim.id for claim in claims if not claim.loads]):
            raise ValueError(f"--loads has no meaning for {', '.join(other)}, whose loads are not raised")
        if args.model is not None and (other := [claim.id for claim in claims if not claim.chosen]):
            raise ValueError(
                f"--model has no meaning for {', '.join(other)}, which no model of yours can be chosen for"
            )
        if any(claim.serves for claim in claims):
            claim_memory()
        for claim in claims:
            check_device(claim)
        documents = [document for some in side_by_side(claims) for document in test(some, args, command)]
    except BrokenPipeError:  # of standard output
        raise
    except (JllmError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({document["experiment"]: document for document in documents}))
    return 0 if all(document["complete"] for document in documents) else 1


if __name__ == "__main__":
    sys.exit(main())
