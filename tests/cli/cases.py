"""What tests of the command line share."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jllm

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"
TALE = "once upon a time there was an old king who had three sons and one golden bird in a tree by the sea"
WORDS = TALE.split(" ")
SUMMARY = re.compile(r"(\d+) tokens? in (\d+\.\d\d) s: (\d+\.\d) tokens/s \(.*\)")


def ban(logits, rows):
    """Bans the token before the one that the request's array names: none where it has no array."""
    banned = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] == rows.own(rows.inputs)["token"][:, None] - 1
    return jnp.where(banned, -jnp.inf, logits)


BANS = jllm.Hooks(logits_processor=ban, inputs={"token": jax.ShapeDtypeStruct((), np.int32)})


def expected(model, prompts, sampling) -> list[jllm.Completion]:
    """What the library says, at the same compiled sizes."""
    return jllm.generate(model, prompts, sampling, max_slots=4, max_step_tokens=32)


def params(**kw) -> jllm.SamplingParams:
    return jllm.SamplingParams(**{"max_new_tokens": 8, "ignore_eos": True, "seed": 5, **kw})


FLAGS = ("--max-new-tokens", 8, "--ignore-eos", "--seed", 5)


def results(path: Path) -> dict[tuple[int, int], dict]:
    """Results by index and sample, without what depends on the clock."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    made = {(r["index"], r.get("sample", 0)): {k: v for k, v in r.items() if k != "timings"} for r in found}
    assert len(made) == len(found)
    return made
