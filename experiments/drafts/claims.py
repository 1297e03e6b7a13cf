"""What is said of speculative decoding, tested: each claim's rows, and a verdict with by how much."""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from experiments.arguments import check_backend
from experiments.drafts.copies import copies, judge_copies, judge_modes, modes
from experiments.drafts.costs import batches, judge_batches, judge_nodes, node_costs
from experiments.drafts.tree_pass import judge_trees, trees
from jllm.engine.drafters import find_drafter
from jllm.errors import ConfigError
from jllm.pretrained import load
from jllm.speculative.tree import MOST_NODES
from pallas_kernels.bench.command import RECORDED

Row = dict[str, Any]
DRAFTS = 4


def distillation(args: argparse.Namespace) -> Iterator[Row]:
    """The draft model before and after it was distilled, from the files of experiments.train_drafters."""
    for path in sorted(RECORDED.glob("train_drafters*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["drafter"] == "draft" and row["depth"] == DRAFTS:
                names = ("learned", "temperature", "acceptance", "low", "high", "tokens_a_step")
                yield {"from": path.name, "drafts": DRAFTS, **{name: row[name] for name in names}}


def judge_distillation(rows: list[Row]) -> tuple[str, str]:
    by = {(row["temperature"], row["learned"]): row["tokens_a_step"] for row in rows}
    gains = {t: by[t, "distilled"] / by[t, "documents"] for t, learned in by if learned == "documents"}
    said = ", ".join(f"{gain:.2f} times the tokens a step at temperature {t:g}" for t, gain in gains.items())
    verdict = "yes" if gains and min(gains.values()) > 1.05 else "no"
    return verdict, f"{said}, after as many steps again"


@dataclass(frozen=True)
class Claim:
    stated: str
    measure: Callable[[argparse.Namespace], Iterator[Row]]
    judge: Callable[[list[Row]], tuple[str, str]]  # of its rows: a verdict, and by how much


CLAIMS = {
    "tree": Claim("one pass over a tree gives what a pass over each of its paths does", trees, judge_trees),
    "distillation": Claim("drafters are accepted more often when distilled", distillation, judge_distillation),
    "copies": Claim("a quantized copy drafts the better the less it errs", copies, judge_copies),
    "rejection": Claim("rejection sampling accepts more than equality with the target's draw", modes, judge_modes),
    "nodes": Claim("the first dozen of a tree's nodes cost next to nothing", node_costs, judge_nodes),
    "batches": Claim("drafts gain less the larger the batch, and lose in the end", batches, judge_batches),
}


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for what one of the claims would be refused for, after the others were measured."""
    check_backend(args.backend)
    if not all(2 <= nodes <= MOST_NODES for nodes in args.nodes):
        raise ConfigError(f"--nodes {' '.join(map(str, args.nodes))}: each must be from 2 to {MOST_NODES}")
    model = load(args.model)
    if args.tokens >= model.config.context:
        raise ConfigError(f"--tokens {args.tokens}: the model's context is {model.config.context}, prompt included")
    find_drafter(args.drafter, model, DRAFTS)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Each claim's rows, then its verdict."""
    check(args)
    for name in args.claims:
        claim, found = CLAIMS[name], []
        for row in claim.measure(args):
            found.append(row)
            yield {"claim": name, **row}
        verdict, measured = claim.judge(found) if found else ("incomplete", "nothing was measured")
        yield {"claim": name, "stated": claim.stated, "measured": measured, "verdict": verdict}
