"""Runs the merged step: step(params, state, batch) -> state, outputs. One compiled function serves every mix of
requests.

A step is `forward` and then `sample`. `forward` (forward.py) writes K and V, and computes logits of decode rows and
of each chunk's last row. `sample` (sample.py) draws the tokens. Short segments come first, then prompt chunks. A
decoding sequence's input is its slot's last sampled token, which is on the device already. A slot that the device has
marked done writes nothing. So the host may dispatch step t + 1 before it has read the tokens of step t.

With a drafter a third part follows: `draft` (draft.py) proposes the next tokens. The next step's segments have rows for
these drafts. `sample` accepts drafts that equal the tokens it draws, so a step may advance a sequence by several
tokens. Between steps the state is that of plain decoding.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.model.hooks import Hooks
from jllm.model.params import Params
from jllm.model.sampling import sample as draw_tokens
from jllm.parallel.ranks import REPLICATED, STACKED, on_mesh
from jllm.speculative.drafter import Drafter
from jllm.step.batch import RaggedBatch
from jllm.step.draft import draft
from jllm.step.draws import draw_apart
from jllm.step.forward import Logits, forward
from jllm.step.sample import Draw, sample
from jllm.step.state import SPREAD, Outputs, State, Variant, spread_drafter

STATIC = ("config", "variant", "backend", "draw", "wanted")
ARRAYS = {"params": STACKED, "state": SPREAD, "batch": REPLICATED, "drafter": spread_drafter, "hooks": REPLICATED}


@on_mesh(ARRAYS | {"logits": REPLICATED}, (SPREAD, REPLICATED))
def sample_step(
    params: Params,
    state: State,
    batch: RaggedBatch,
    logits: Logits,
    drafter: Drafter | None = None,
    hooks: Hooks | None = None,
    *,
    config: LlamaConfig,
    variant: Variant = Variant(),
    backend: str | None = None,
    draw: Draw = draw_tokens,
    wanted: bool = True,
) -> tuple[State, Outputs]:
    """Runs the second half of a merged step after forward: sample and, with a drafter, draft."""
    state, outputs = sample(state, logits, hooks, variant=variant, backend=backend, draw=draw)
    if drafter is not None:
        state = draft(params, state, batch, logits, outputs, drafter, config=config, backend=backend, wanted=wanted)
    elif state.drafts is not None:  # the sequences have passed these drafts
        state = replace(state, drafts=replace(state.drafts, count=jnp.zeros_like(state.drafts.count)))
    if variant.guided and state.drafts is not None:
        outputs = replace(outputs, drafts=(state.drafts.tokens, state.drafts.count))
    return state, outputs


@on_mesh(ARRAYS, (SPREAD, REPLICATED))
def eager_step(
    params: Params,
    state: State,
    batch: RaggedBatch,
    drafter: Drafter | None = None,
    hooks: Hooks | None = None,
    *,
    config: LlamaConfig,
    variant: Variant = Variant(),
    backend: str | None = None,
    draw: Draw = draw_tokens,
    wanted: bool = True,
) -> tuple[State, Outputs]:
    """Runs one merged step: forward, sample and, with a drafter, draft. `wanted` is whether the next step may verify
    drafts. `step` is this function under jit, where config, variant, backend, draw and wanted are static. The old state
    stays usable."""
    options: dict[str, Any] = {"config": config, "variant": variant, "backend": backend}
    takes_rows = variant.takes_rows or variant.taps or hooks is not None
    parts = draw is draw_tokens and not takes_rows
    state, logits = forward(params, state, batch, hooks, **options, parts=parts)
    if logits.values.shape[1] != config.vocab_size:
        draw = draw_apart(config, variant.draws)
    return sample_step(params, state, batch, logits, drafter, hooks, **options, draw=draw, wanted=wanted)


step = partial(jax.jit, static_argnames=STATIC)(eager_step)
