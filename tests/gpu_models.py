"""Small models whose shapes Hopper's kernels take, and what runs them on a device."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jllm.engine.engine import Engine
from jllm.engine.request import Completion, SamplingParams
from jllm.model.model import Model
from jllm.model.param_specs import init_params
from jllm.programs.packed_step import packed_step
from jllm.quant.quantize import quantize
from tests.kernels_of import kernels_of
from tests.tiny import CONFIG

LAYERS = 2
SMALL = {"hidden_size": 512, "intermediate_size": 768}
SHAPES = {
    "D=64": SMALL | {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64},
    "D=128": SMALL | {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128},
    # Kernels for plain products run unasked where they were measured, which was at such widths.
    "7B": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_heads": 32, "num_kv_heads": 32, "head_dim": 128,
    },
}  # fmt: skip


def kernel_model(shape: str, scheme: str = "bf16", dtype: str = "bfloat16") -> Model:
    """Random weights such that attention has preferences and logits have a deviation of about 3."""
    config = replace(CONFIG, vocab_size=512, context=1024, num_layers=LAYERS, dtype=dtype, **SHAPES[shape])
    params = init_params(config, jax.random.key(0))  # weights have a deviation of 0.02

    def of_inputs(w: jax.Array, gain: float = 1.0) -> jax.Array:
        """As large as makes a product of normalized inputs have a deviation of `gain`."""
        return w if w.ndim < 2 else w * jnp.asarray(gain / (0.02 * w.shape[1] ** 0.5), w.dtype)

    params = replace(jax.tree.map(of_inputs, params), head=of_inputs(params.head, 3.0))
    return Model(config, params if scheme == "bf16" else quantize(params, scheme), None)


@dataclass(frozen=True)
class Job:
    """A request, and how many steps of the engine come before it."""

    prompt: Sequence[int]
    params: SamplingParams
    arrival: int = 0


def play(engine: Engine, jobs: Sequence[Job]) -> list[Completion]:
    """Completions in the order of the jobs."""
    ids: dict[int, int] = {}
    done: dict[int, Completion] = {}
    for clock in range(3000):
        for i, job in enumerate(jobs):
            if job.arrival == clock:
                ids[i] = engine.submit(list(job.prompt), job.params)
        done |= {event.id: event.completion for event in engine.step() if event.completion}
        if len(done) == len(jobs):
            return [done[ids[i]] for i in range(len(jobs))]
    raise AssertionError("the engine makes no progress")


def kernels_of_steps(engine: Engine) -> list[Counter[str]]:
    """Those of each compiled step that an engine used, by rows. They were traced already."""
    device = engine._device
    found = []
    for key in sorted(device.programs.used, key=lambda key: key[0].size):
        traced = packed_step.trace(*device.shapes.arguments(*key), **device.shapes.static(*key))
        found.append(kernels_of(traced.jaxpr.jaxpr))
    return found
