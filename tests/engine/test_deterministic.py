"""Engines with deterministic=True: log-probabilities are to the bit those of a request alone, in float32 and bfloat16.

Preemption computes generated tokens again as a prompt's, by the other of the two attention operations; so these pools
are large enough, and a prefix cache gives no one the tokens that another generated.
"""

from dataclasses import replace

import pytest

import jllm
from jllm.batch import Bucket
from jllm.engine.engine import Engine
from jllm.engine.options import EngineOptions
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError
from jllm.quant.quantize import quantize
from pallas_kernels import one_order
from pallas_kernels.matmul import config as matmul_config
from tests.engine.test_oracle import COMPANY, QUANTIZED, TINY, alone, jobs, play
from tests.tiny import tiny_model

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

EXACT = {"deterministic": True, "prefix_cache": False}
SIZES = {
    TINY: COMPANY[TINY],
    "decodes apart": {
        "max_slots": 6, "page_size": 16, "max_step_tokens": 16, "buckets": (Bucket(6, 0, 0), Bucket(6, 16, 3)),
    },
}  # fmt: skip
CASES = [
    ("float32", None, None, TINY),
    ("float32", None, "int8-g8", "decodes apart"),
    ("float32", "w8a8-all", None, TINY),
    ("float32", "w8a8", "fp8", "decodes apart"),
    ("float32", "w8a8-groups", None, "decodes apart"),
    ("float32", "w4a16-g32", None, "decodes apart"),
    ("bfloat16", "fp8", None, "decodes apart"),
    ("bfloat16", None, None, TINY),
]


@pytest.mark.parametrize(("dtype", "scheme", "kv_cache", "sizes"), CASES, ids=str)
def test_logprobs_are_those_of_a_request_alone(dtype, scheme, kv_cache, sizes):
    model = tiny_model(dtype, **QUANTIZED)
    if scheme is not None:
        model = replace(model, params=quantize(model.params, scheme))
    options = EXACT | {"kv_cache": kv_cache}

    @settings(max_examples=4, suppress_health_check=list(HealthCheck))
    @given(st.lists(jobs, min_size=2, max_size=7))
    def check(found):
        asked = [replace(job, params=replace(job.params, logprobs=3)) for job in found]
        seen: dict = {}
        got = play(model, asked, SIZES[sizes] | options, seen)
        assert not seen["preemptions"]
        for job, completion, want in zip(asked, got, alone(model, asked, **options), strict=True):
            count = len(completion.token_ids)
            assert job.abort_after is not None or completion.finish_reason == want.finish_reason
            assert completion.token_ids == want.token_ids[:count]
            assert completion.logprobs == want.logprobs[:count]

    check()


def test_a_scale_that_all_tokens_share_is_refused():
    model = tiny_model(**QUANTIZED)
    model = replace(model, params=quantize(model.params, "w8a8-tensor"))
    with pytest.raises(ConfigError, match="one scale for all tokens of a step.*w8a8 does"):
        Engine(model, deterministic=True)
    Engine(model)


def test_what_has_no_one_order_here_is_refused_before_anything_runs(monkeypatch):
    for module in (one_order, matmul_config):
        monkeypatch.setattr(module, "on_hopper", lambda: True)
    monkeypatch.setattr(one_order, "capability", lambda: "9.0")
    with pytest.raises(ConfigError, match="has no product for model.layers.0.self_attn.qkv_proj: .*no float32 matmul"):
        Engine(tiny_model("float32"), deterministic=True)
    monkeypatch.setattr(one_order, "on_hopper", lambda: False)
    monkeypatch.setattr(one_order, "capability", lambda: "8.0")
    with pytest.raises(ConfigError, match="deterministic is for Hopper GPUs and CPUs"):
        Engine(tiny_model("bfloat16"), deterministic=True)


def test_it_chooses_the_kernels_itself():
    with pytest.raises(ConfigError, match="deterministic chooses the kernels: leave backend='xla' out"):
        EngineOptions(deterministic=True, backend="xla")
    with pytest.raises(ConfigError, match="deterministic must be True or False, not 1"):
        EngineOptions(deterministic=1)  # type: ignore[arg-type]
    model = tiny_model()
    greedy = SamplingParams(temperature=0.0, max_new_tokens=4)
    (found,) = jllm.generate(model, [[5, 6, 7]], greedy, deterministic=True, executables=None)
    (plain,) = jllm.generate(model, [[5, 6, 7]], greedy, executables=None)
    assert found.token_ids == plain.token_ids
