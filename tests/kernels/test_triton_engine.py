"""Checks the engine of a model that is told "triton", in Triton's interpreter. A GPU's runs are those of
tests/test_gpu_oracle.py."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.model.model import Model
from jllm.model.param_specs import init_params
from jllm.quant.quantize import quantize
from jllm.speculative.quantized_copy import QuantizedCopy
from jllm.speculative.tree import Tree
from jllm.step.buckets import Bucket
from pallas_kernels.triton import triton_call
from tests.gpu_models import Job, play
from tests.kernels import triton_tools
from tests.tiny import CONFIG

pytest.importorskip("triton")  # of extras and development, for Linux alone

OPTIONS = {"max_slots": 2, "page_size": 16, "num_pages": 40, "max_step_tokens": 14, "executables": None}
ONE_SIZE = {"buckets": (Bucket(2, 12, 2),)}
TREE = Tree((0, 0, 1))
ROUNDING = 0.25  # of a log-probability (natural), in bfloat16 with other orders of sums


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(triton_call, "call", triton_tools.interpret)


@cache
def model(scheme: str) -> Model:
    config = replace(
        CONFIG, vocab_size=96, context=256, dtype="bfloat16", hidden_size=128, intermediate_size=256, head_dim=64,
        windows=(20, None),
    )  # fmt: skip
    params = init_params(config, jax.random.key(0))
    params = jax.tree.map(lambda w: w if w.ndim < 2 else w * jnp.asarray(5, w.dtype), params)
    return Model(config, params if scheme == "bf16" else quantize(params, scheme), None)


def jobs(tokens: int) -> list[Job]:
    """Returns a prompt of two chunks, and one that comes later and is drawn."""
    params = [
        SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=3, logprobs=2, temperature=t) for t in (0.0, 0.8)
    ]
    return [Job(tuple(range(3, 26)), params[0]), Job((5, 7, 11), params[1], 1)]


@pytest.mark.parametrize(("scheme", "kv"), [("bf16", "k=fp8,v=int4-g32"), ("w8a8-all", "int8-g8-zp")])
def test_company_changes_no_bit_and_xla_says_about_the_same(scheme, kv):
    def completions(jobs, backend="triton"):
        return play(Engine(model(scheme), **OPTIONS, **ONE_SIZE, kv_cache=kv, backend=backend), jobs)

    together = completions(jobs(3))
    for job, got, other in zip(jobs(3), together, completions(jobs(3), "xla"), strict=True):
        (want,) = completions([Job(job.prompt, job.params)])
        assert got.token_ids == want.token_ids
        assert got.logprobs == want.logprobs
        assert abs(got.logprobs[0].logprob - other.logprobs[0].logprob) < ROUNDING


def test_drafts_in_a_tree_are_accepted_and_moved():
    """Drafts by the target's own copy what the target draws, up to near ties; moves of tokens have no Triton kernel."""
    target = model("bf16")
    drafter = QuantizedCopy(target.params, TREE)
    engine = Engine(target, **OPTIONS | {"max_step_tokens": 24}, speculate=drafter, drafts=3, backend="triton")
    assert [len(each.token_ids) for each in play(engine, jobs(4))] == [4, 4]
    assert engine.metrics()["draft_acceptance"][1] > 0.5
