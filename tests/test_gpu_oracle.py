"""On a device (`pytest -m gpu`): the oracle of the engine, through the kernels that it runs there unasked.

Each request gets the tokens that it gets alone. What Hopper's kernels compute of a row depends on that row alone, and
XLA's products of the same number of rows add up alike: so in one compiled size that is so to the bit, whatever else is
in the batch, wherever chunks end and whatever the prefix cache held. Other sizes, pages and preemption change the order
of sums: there tokens are the same up to the first position where the two likeliest nearly tie.
"""

from dataclasses import dataclass

import numpy as np
import pytest

import jllm
from jllm.engine.engine import Engine
from jllm.engine.request import Completion, SamplingParams
from jllm.step.buckets import Bucket
from tests.gpu_models import LAYERS, Job, kernel_model, kernels_of_steps, play
from tests.kernels_of import of_step

pytestmark = pytest.mark.gpu

ONE_SIZE = {"max_slots": 4, "page_size": 16, "num_pages": 160, "max_step_tokens": 100, "buckets": (Bucket(4, 96, 4),)}


@dataclass(frozen=True)
class Case:
    shape: str
    scheme: str = "bf16"
    kv_cache: str | None = None
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.shape} {self.scheme} kv={self.kv_cache or self.dtype}"

    @property
    def products(self) -> dict[str, int]:
        """Kernels for a layer's products, of 100 rows."""
        if self.shape == "7B":
            return {"gemm_skinny": 3, "gemm_skinny_gated": 1}
        quantized = {"gemm_tall": 4, "silu_mul_quant": 1, "norm_quant": 1}  # attention's output, too
        return {"w8a8-all": quantized, "fp8": quantized, "w4a16-g128": {"weight_only_matmul": 4}}.get(self.scheme, {})

    def engine(self, **changes) -> Engine:
        options = ONE_SIZE | {"kv_cache": self.kv_cache} | changes
        return Engine(kernel_model(self.shape, self.scheme, self.dtype), **options)


CASES = [
    Case("D=128"),
    Case("D=64", dtype="float16"),
    Case("D=128", kv_cache="fp8"),
    Case("D=64", kv_cache="int8-g8"),
    Case("D=64", kv_cache="int4-g16"),
    Case("D=128", kv_cache="k=int8-g64,v=bf16"),
    Case("D=128", "w8a8-all", "int8-g8"),
    Case("D=64", "fp8", "fp8"),
    Case("D=128", "w4a16-g128"),
    Case("7B"),
]
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02}


def jobs(sampled: bool = True) -> list[Job]:
    """Long prompts and short ones, one twice, that come and go while others run: more than there are slots."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, 512, n).tolist()) for n in (70, 3, 600, 1, 150, 40)]
    prompts.append(prompts[4])  # whose pages the prefix cache has by then
    found = []
    for i, (prompt, arrival) in enumerate(zip(prompts, (0, 0, 1, 2, 4, 9, 60), strict=True)):
        how = SAMPLED if sampled and i % 2 else {"temperature": 0.0}
        params = SamplingParams(max_new_tokens=64 + i, ignore_eos=True, seed=i, logprobs=2, **how)
        found.append(Job(prompt, params, arrival))
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_company_changes_no_bit(case):
    engine = case.engine()
    together = play(engine, jobs())
    assert kernels_of_steps(engine) == [of_step(LAYERS, chunks=True, **case.products)]
    assert engine.metrics()["prefix_hit_tokens"] >= 144
    for job, got in zip(jobs(), together, strict=True):
        (want,) = play(case.engine(), [Job(job.prompt, job.params)])
        assert got.token_ids == want.token_ids
        assert got.logprobs == want.logprobs


TRITON = [
    Case("D=128"),
    Case("D=64", kv_cache="int4-g16", dtype="float16"),
    Case("D=128", "w8a8-all", "int8-g8-zp"),
    Case("D=64", "fp8", "fp8"),
    Case("D=128", "w4a16-g128", "int8-g8"),
]


@pytest.mark.parametrize("case", TRITON, ids=str)
def test_company_changes_no_bit_under_triton(case):
    pytest.importorskip("jax_triton")
    together = play(case.engine(backend="triton"), jobs())
    for job, got in zip(jobs(), together, strict=True):
        (want,) = play(case.engine(backend="triton"), [Job(job.prompt, job.params)])
        assert got.token_ids == want.token_ids
        assert got.logprobs == want.logprobs
    if case.scheme == "bf16":  # what rounds activations to 8 bits tells two orders of sums further apart
        (other,) = play(case.engine(backend="xla"), jobs(sampled=False)[:1])
        assert compare(together[0], other) > 4  # jobs()[0] is greedy


SAME_PAGES = {
    "short chunks": {"max_step_tokens": 24, "buckets": (Bucket(4, 20, 4),)},
    "decodes apart": {"max_step_tokens": 260, "buckets": (Bucket(1, 0, 0), Bucket(4, 0, 0), Bucket(4, 256, 4))},
}


EXACT = [
    Case("D=128"),
    Case("D=64", kv_cache="int8-g8", dtype="float16"),
    Case("D=128", "w8a8-all", "int8-g8"),
    Case("D=64", "fp8", "fp8"),
    Case("D=128", "w4a16-g128"),
    Case("7B"),
]


@pytest.mark.parametrize("other", SAME_PAGES)
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_deterministic_bits_are_those_alone_in_other_sizes(case, other):
    together = play(case.engine(deterministic=True, **SAME_PAGES[other]), jobs())
    for job, got in zip(jobs(), together, strict=True):
        (want,) = play(case.engine(deterministic=True), [Job(job.prompt, job.params)])
        assert got.token_ids == want.token_ids
        assert got.logprobs == want.logprobs


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_deterministic_bits_are_the_trainers(case):
    """Draws in a pool that forces preemption."""
    engine = case.engine(deterministic=True, **OTHERS["a pool that forces preemption"])
    found = play(engine, jobs(sampled=False))
    counts = engine.metrics()
    assert counts["preemptions"]
    assert counts["prefix_hits"]
    tokens = np.zeros((len(found), 700), np.int32)
    for row, job, got in zip(tokens, jobs(), found, strict=True):
        row[: len(job.prompt) + len(got.token_ids)] = [*job.prompt, *got.token_ids]
    plain, lengths = kernel_model(case.shape, dtype=case.dtype), np.full(len(found), 700, np.int32)
    options = engine.token_logprobs_options()
    scored = jllm.token_logprobs(plain.params, plain.config, tokens, lengths, **options)
    for row, job, got in zip(np.asarray(scored), jobs(), found, strict=True):
        assert row[len(job.prompt) - 1 :][: len(got.token_ids)].tolist() == [each.logprob for each in got.logprobs]


TIE = 0.25  # a gap (natural log) under which rounding to bfloat16 may choose either
DRIFT = 0.2  # what rounding moves a token's log-probability by, at most
OTHERS = {
    "small pages, short chunks": {"page_size": 8, "num_pages": 320, "max_step_tokens": 24,
                                  "buckets": (Bucket(4, 20, 4),)},
    "large pages, decodes apart": {
        "page_size": 64, "num_pages": 40, "max_step_tokens": 260, "buckets": (Bucket(4, 0, 0), Bucket(4, 256, 4)),
    },
    "a pool that forces preemption": {"num_pages": 48, "buckets": (Bucket(4, 0, 0), Bucket(4, 96, 4))},
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("case", [Case("D=128"), Case("D=64", "w4a16-g128", "int8-g8")], ids=str)
def test_other_sizes_up_to_the_first_near_tie(case, other):
    engine = case.engine(**OTHERS[other])
    found = play(engine, jobs(sampled=False))
    assert all(kernels["decode_attention"] == LAYERS for kernels in kernels_of_steps(engine))
    assert (engine.metrics()["preemptions"] > 0) == ("preemption" in other)
    wants = play(case.engine(), jobs(sampled=False))
    assert sum(compare(got, want) for got, want in zip(found, wants, strict=True)) > 50


def compare(got: Completion, want: Completion) -> int:
    """How many tokens are the same before the first that is another, which is where the two likeliest nearly tie."""
    for i, (a, b) in enumerate(zip(got.logprobs, want.logprobs, strict=True)):
        if got.token_ids[i] != want.token_ids[i]:
            assert b.top[0][1] - b.top[1][1] < TIE
            return i
        assert abs(a.logprob - b.logprob) < DRIFT
    return len(got.token_ids)
