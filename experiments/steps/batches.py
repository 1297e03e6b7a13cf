"""Defines whole batches as in PPL.LLM's table: prompts and outputs of one length, and the steps that compute them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.steps.floors import Floor, Work, step_work
from experiments.steps.timer import layout_of
from jllm.programs.packed_step import Layout

STEP_TOKENS = 4096  # most prompt tokens of a step, by default


@dataclass(frozen=True)
class WholeBatch:
    """A row of the table. All prompts have `input` tokens, and all outputs `output`."""

    batch: int
    input: int
    output: int

    @property
    def context(self) -> int:
        """Returns the tokens in each slot's pages in the middle of its output."""
        return self.input + self.output // 2

    @property
    def decode_work(self) -> Work:
        """Returns the work of one step in the middle of the output."""
        return step_work(self.batch, self.batch * self.context)

    def prefill(self, step_tokens: int) -> "Prefill":
        """Returns the steps that compute all prompts: whole prompts in equal shares, or one prompt in equal chunks."""
        if self.input > step_tokens:
            return Prefill(1, -(-self.input // -(-self.input // step_tokens)))
        steps = -(-self.batch // (step_tokens // self.input))
        return Prefill(-(-self.batch // steps), self.input)


@dataclass(frozen=True)
class Prefill:
    """Steps of one size: chunks of equally many prompts, with equally many tokens."""

    prompts: int
    tokens: int

    @property
    def layout(self) -> Layout:
        return layout_of(tokens=self.prompts * self.tokens, prompts=self.prompts)

    def spans(self, case: WholeBatch) -> list[list[tuple[int, int, int]]]:
        """Returns the (slot, start, tokens) of the chunks of each step."""
        steps = []
        for first in range(0, case.batch, self.prompts):
            for start in range(0, case.input, self.tokens):
                n = min(self.tokens, case.input - start)
                steps.append([(slot, start, n) for slot in range(first, min(first + self.prompts, case.batch))])
        return steps

    def work(self, case: WholeBatch) -> list[Work]:
        """Returns the work of each step."""
        return [step_work(0, 0, ((at, n, at + n == case.input) for _, at, n in step)) for step in self.spans(case)]


def floor_columns(
    floors: Mapping[str, Floor],
    case: WholeBatch,
    token_bytes: float,
    prefill_s: float,
    decode_s: float,
    step_tokens: int = STEP_TOKENS,
) -> dict[str, Any]:
    """Returns the floors of a row's prompts and of its decode step, and the shares of the measured seconds."""
    found: dict[str, Any] = {}
    for name, floor in floors.items():
        prefill = sum(floor.of(work, token_bytes) for work in case.prefill(step_tokens).work(case))
        decode = floor.of(case.decode_work, token_bytes)
        found |= {f"prefill_{name}_ms": 1e3 * prefill, f"decode_{name}_ms": 1e3 * decode}
        found |= {f"prefill_{name}_fraction": prefill / prefill_s, f"{name}_fraction": decode / decode_s}
    return found
