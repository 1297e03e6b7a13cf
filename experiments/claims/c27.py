"""Tests C27: half of the tokens that static batching computes are not wanted.

Rows follow from the lengths of two workloads; nothing runs. A static batch takes requests in their order, or in a
random one. It decodes until its longest member has ended, and computes a token per member at every step. `unwanted` is
the share of tokens after their request's end. If prompts are padded to the longest of their batch, `padded` is the
share of padding rows. An answer cut by a limit ends there in both counts, so the limit changes nothing.
"""

import random
import statistics
from collections.abc import Iterator, Sequence

from experiments.claims.claim import Answer, Claim, Row, in_all, in_most, percents
from experiments.simulation.requests import read_workload

WORKLOADS = ("ppl_samples_1024", "stories")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHUFFLES = 100
LEAST, STATED = 0.05, 0.5  # least share that counts as waste, and the stated one


def measure(toy: bool) -> Iterator[Row]:
    for name in WORKLOADS[:1] if toy else WORKLOADS:
        samples = read_workload(name).samples
        prompts, outputs = [len(s.prompt) for s in samples], [s.output for s in samples]
        for batch in BATCHES:
            shares = [unwanted_share(order, batch) for order in shuffled(outputs)]
            yield {
                "workload": name, "source": "counted", "requests": len(samples), "batch": batch,
                "unwanted": round(unwanted_share(outputs, batch), 4),
                "unwanted_shuffled": round(statistics.mean(shares), 4),
                "unwanted_low": round(min(shares), 4), "unwanted_high": round(max(shares), 4),
                "padded": round(unwanted_share(prompts, batch), 4),
            }  # fmt: skip


def unwanted_share(lengths: Sequence[int], batch: int) -> float:
    """Returns the wasted share in batches of consecutive requests, if each member costs as much as the longest."""
    batches = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
    return 1 - sum(lengths) / sum(len(members) * max(members) for members in batches)


def shuffled(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields the lengths in random orders, which are always the same."""
    rng = random.Random(0)
    for _ in range(SHUFFLES):
        yield rng.sample(lengths, len(lengths))


def wasted(rows: list[Row]) -> list[float]:
    """Returns the unwanted shares by workload, for batches larger than one."""
    return [row["unwanted_shuffled"] for row in rows if row["batch"] > 1]


def holds(rows: list[Row]) -> Answer:
    """Decides by each batch size. LEAST counts as some waste, and half is the stated one."""
    found = wasted(rows)
    return in_most(share >= LEAST for share in found), in_all(share >= STATED for share in found)


def words(rows: list[Row]) -> tuple[str, str]:
    found = wasted(rows)
    half = f"half or more in {sum(share >= STATED for share in found)} of {len(found)} cases"
    return f"{percents(found)}, {half}", f"Static batches waste {percents(found)} of their tokens, {half}."


CLAIM = Claim(
    id="C27",
    stated="half of the computed tokens are not wanted",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
