"""Claims about who drafts: a quantized copy of the target, and drafts that are accepted by rejection sampling."""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.drafts.acceptance import Served, interval, serve, tokens_a_step
from experiments.drafts.tree_pass import logits_of
from experiments.drafts.workloads import read_stories
from jllm.batch import Bucket
from jllm.engine.drafters import find_drafter
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.pretrained import Model, load
from jllm.quant.quantize import quantize
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.quantized_copy import QuantizedCopy
from jllm.speculative.tree import chain

Row = dict[str, Any]
COPIES = ("bf16", "w8a16", "w4a16-g32", "w4a16-g64", "nf4")  # schemes; the first is the target itself
DRAFTS = 4


def copies(args: argparse.Namespace) -> Iterator[Row]:
    """Acceptance of quantized copies, with K and V of their own and with the target's, beside their distance from the
    target on the same texts at temperature 1: mean KL divergence in nats, total variation (tv), and the acceptance that
    this promises at least, (1 - tv) / (1 + tv) (Daliri et al., arXiv 2408.07978)."""
    model = load(args.model)
    prompts = read_stories(model, args.documents)
    model = replace(model, tokenizer=None)
    for scheme, keys in itertools.product(COPIES, ("own", "shared")):
        copy = replace(model, params=quantize(model.params, scheme))
        own, shared = DraftModel(copy.params, copy.config, chain(DRAFTS)), QuantizedCopy(copy.params, chain(DRAFTS))
        drafter = shared if keys == "shared" else own
        with_copy = one_slot(model, max(map(len, prompts)), args, speculate=drafter, drafts=DRAFTS)
        row: Row = {"scheme": scheme, "kv": keys, "drafts": DRAFTS, "documents": len(prompts)}
        for temperature in (0.0, 1.0):
            served = serve_documents(with_copy, prompts, temperature, args.tokens)
            row |= {
                f"acceptance_{temperature:g}": round(pooled(served), 4),
                f"acceptance_{temperature:g}_95": interval(served, pooled),
                f"tokens_a_step_{temperature:g}": round(tokens_a_step(served), 4),
            }
        with_copy.close()
        if keys == "own":
            texts = [[*p, *s.tokens] for p, s in zip(prompts, served)]
            row |= distance(model, copy, texts, list(map(len, prompts)))
        yield row


def one_slot(model: Model, prompt: int, args: argparse.Namespace, **options: Any) -> Engine:
    buckets = (Bucket(1, 0, 0), Bucket(1, prompt, 1))
    sizes: dict[str, Any] = {"max_slots": 1, "max_step_tokens": prompt + 1, "buckets": buckets, "prefix_cache": False}
    return Engine(model, backend=args.backend, **sizes, **options)


def serve_documents(engine: Engine, prompts: Sequence[list[int]], temperature: float, tokens: int) -> list[Served]:
    asked: Row = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
    return [serve(engine, prompt, SamplingParams(seed=i, **asked)) for i, prompt in enumerate(prompts)]


def pooled(served: Sequence[Served]) -> float:
    """Acceptance of a draft where those before it were accepted, of all depths together: of the drafts that were
    compared, a step has those accepted, and one more that was not unless all were."""
    right = sum(each.segments * sum(each.accepted.values()) for each in served)
    wrong = sum(each.segments * (1 - each.accepted[max(each.accepted)]) for each in served)
    return right / (right + wrong)


def distance(target: Model, copy: Model, texts: Sequence[list[int]], first: Sequence[int]) -> Row:
    """How far a copy's next-token distributions are from the target's, in texts from token `first` on."""
    length, found = max(map(len, texts)), []
    for text, start in zip(texts, first):
        pair = [log_softmax(logits_of(model, text, length)[start - 1 : len(text) - 1]) for model in (target, copy)]
        p, q = map(np.exp, pair)
        found.append((np.sum(p * (pair[0] - pair[1]), axis=1), 0.5 * np.abs(p - q).sum(axis=1)))
    kl, tv = (np.concatenate(each) for each in zip(*found))
    return {
        "kl": float(f"{kl.mean():.3g}"),
        "tv": float(f"{tv.mean():.3g}"),
        "least_acceptance_1": round(float(np.mean((1 - tv) / (1 + tv))), 4),
    }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def judge_copies(rows: list[Row]) -> tuple[str, str]:
    """Whether what is promised holds, and acceptance falls as the distance grows; with K and V of their own, of which
    both are said."""
    own, shared = ([row for row in rows if row["kv"] == keys] for keys in ("own", "shared"))
    held = all(row["acceptance_1_95"][1] >= row["least_acceptance_1"] for row in own)
    ordered = [row["acceptance_1"] for row in sorted(own, key=lambda row: row["kl"])]
    falls = all(a + 0.02 >= b for a, b in zip(ordered, ordered[1:]))
    pairs = [(a, b) for a, b in zip(own, shared) if a["scheme"] != "bf16"]
    ends = max(pairs, key=lambda pair: pair[0]["acceptance_1"]), min(pairs, key=lambda pair: pair[0]["acceptance_1"])
    said = "; ".join(
        f"{row['scheme']} (KL {row['kl']:.2g}) is accepted {row['acceptance_1']:.0%} at temperature 1, greedily "
        f"{row['acceptance_0']:.0%}; {with_shared['acceptance_1']:.0%} and {with_shared['acceptance_0']:.0%} with the "
        "target's K and V"
        for row, with_shared in ends
    )
    return ("yes" if held and falls else "partly" if held else "no"), said


def modes(args: argparse.Namespace) -> Iterator[Row]:
    """Acceptance of the same drafter by equality with the target's draw, and by rejection sampling."""
    model = load(args.model)
    prompts = read_stories(model, args.documents)
    model = replace(model, tokenizer=None)
    drafter = find_drafter(args.drafter, model, DRAFTS)
    for mode in ("equal", "rejection"):
        options: Row = {"speculate": drafter, "drafts": DRAFTS, "acceptance": mode}
        engine = one_slot(model, max(map(len, prompts)), args, **options)
        for temperature in (0.7, 1.0):
            served = serve_documents(engine, prompts, temperature, args.tokens)
            yield {
                "acceptance": mode,
                "drafter": args.drafter,
                "drafts": DRAFTS,
                "documents": len(prompts),
                "temperature": temperature,
                "accepted": round(pooled(served), 4),
                "accepted_95": interval(served, pooled),
                "tokens_a_step": round(tokens_a_step(served), 4),
            }
        engine.close()


def judge_modes(rows: list[Row]) -> tuple[str, str]:
    """Of a total variation tv, rejection accepts 1 - tv and equality (1 - tv) / (1 + tv) at least: r / (2 - r)."""
    by = {(row["acceptance"], row["temperature"]): row for row in rows}
    said, held, more = [], True, True
    for temperature in sorted({row["temperature"] for row in rows}):
        equal, rejection = by["equal", temperature], by["rejection", temperature]
        least = rejection["accepted_95"][0] / (2 - rejection["accepted_95"][0])
        held &= equal["accepted_95"][1] >= least
        more &= rejection["accepted"] > equal["accepted"]
        said.append(f"{rejection['accepted']:.0%} for {equal['accepted']:.0%} at temperature {temperature:g}")
    return ("yes" if held and more else "partly" if held else "no"), ", ".join(said)
