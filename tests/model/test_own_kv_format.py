"""A KV format of the caller's own: three bits a value. The engine holds it as it holds its own formats."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.analysis.evaluate import evaluate
from jllm.analysis.protocols import Protocol
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError, EvaluationError, SnapshotError
from jllm.files import snapshot as snapshots
from pallas_kernels import decode_attention
from pallas_kernels.formats.kv_formats import KVFormat, bytes_per_token, decode, encode
from pallas_kernels.formats.kv_pages import allocate
from tests.tiny import greedy, one_size, tiny_model

pytest.importorskip("hypothesis")
from tests.engine.test_oracle import COMPANY, TINY, Job, alone, assert_same, play  # noqa: E402


@dataclass(frozen=True)
class Int3(KVFormat):
    """Codes -3 .. 3, and a scale for each eight of them, which are three bytes: code i at bits 3i .. 3i + 2."""

    dtype: str = "uint8"
    group: int | None = 8
    bits = 3

    def encode(self, x):
        groups = x.reshape(*x.shape[:-1], -1, 8).astype(jnp.float32)
        scales = jnp.clip(jnp.abs(groups).max(axis=-1) / 3, 6.2e-5, 65504).astype(jnp.float16)
        codes = jnp.clip(jnp.round(groups / scales[..., None].astype(jnp.float32)), -3, 3) + 3  # 0 .. 6
        bits = jnp.unpackbits(codes.reshape(*x.shape, 1).astype(jnp.uint8), axis=-1, count=3, bitorder="little")
        return jnp.packbits(bits.reshape(*x.shape[:-1], -1), axis=-1, bitorder="little"), scales

    def decode(self, values, scales, dtype):
        bits = jnp.unpackbits(values, axis=-1, bitorder="little").reshape(*values.shape[:-1], -1, 8, 3)
        codes = jnp.packbits(bits, axis=-1, bitorder="little")[..., 0].astype(dtype) - 3
        return (codes * scales[..., None].astype(dtype)).reshape(*values.shape[:-1], -1)


@pytest.mark.parametrize("hadamard", [False, True])
def test_what_is_stored_is_near_what_was_given(hadamard):
    x = np.random.default_rng(0).standard_normal((5, 2, 32)).astype(np.float32)
    fmt = Int3(hadamard=hadamard)
    values, scales = jax.jit(lambda x: encode(x, fmt))(x)
    assert (values.shape, values.dtype, scales.shape) == ((5, 2, 12), jnp.uint8, (5, 2, 4))
    back = np.asarray(decode(values, scales, fmt, jnp.float32))
    error = np.linalg.norm(back - x) / np.linalg.norm(x)
    assert 0.05 < error < 0.25, "three bits are about so near"


def test_sizes_follow_from_its_bits():
    pages = allocate(5, 3, 16, 32, Int3(), KVFormat("int4", 8))
    assert pages.k.values.shape == (5, 3, 16, 12)
    assert (pages.k.head_dim, pages.v.head_dim) == (32, 32)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(pages))
    assert whole == 5 * 16 * bytes_per_token(32, 3, Int3(), KVFormat("int4", 8))
    assert Int3(hadamard=True).name == "Int3-g8-h"


@dataclass(frozen=True)
class Lookalike(KVFormat):
    """Says of itself what kernels know, and means something else."""

    dtype: str = "int8"
    group: int | None = 8


@pytest.mark.parametrize("own", [Int3(), Lookalike()], ids=lambda fmt: fmt.name)
def test_kernels_refuse_it_in_one_line_and_xla_takes_their_place(own):
    for k, v in ((own, KVFormat("bfloat16")), (KVFormat("bfloat16"), own)):
        pages = jax.eval_shape(lambda k=k, v=v: allocate(4, 8, 32, 128, k, v))
        q = jax.ShapeDtypeStruct((2, 32, 128), jnp.bfloat16)
        table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 4), (2,)))

        def attend(backend, q=q, pages=pages, table=table, lengths=lengths):
            run = decode_attention.decode_attention
            return jax.eval_shape(lambda *given: run(*given, scale=0.1, backend=backend), q, pages, table, lengths)

        known = f"[KV] stored as {own.codes} is not supported by backend mosaic"
        with pytest.raises(NotImplementedError, match=known) as refusal:
            attend("mosaic")
        assert "\n" not in str(refusal.value)
        assert attend("hopper").shape == q.shape


@pytest.mark.parametrize("kv_cache", [Int3(), (Int3(hadamard=True), KVFormat("float16"))], ids=["both", "k"])
def test_any_company_same_tokens(kv_cache):
    prompts = [tuple(range(3, 30)), (50, 3, 3), tuple(range(60, 80)), (7,)]
    jobs = [
        Job(p, SamplingParams(temperature=t, max_new_tokens=16, seed=i, ignore_eos=True), i, None)
        for i, (p, t) in enumerate(zip(prompts, (0.0, 1.0, 0.7, 0.0), strict=True))
    ]
    with jax.enable_x64(True):
        model = tiny_model("float64", num_layers=1)
        options = COMPANY[TINY] | {"kv_cache": kv_cache}
        done = play(model, jobs, options)
        for completion, want in zip(done, alone(model, jobs, **options), strict=True):
            assert_same(completion, want, False)
        plain = alone(model, jobs, **COMPANY[TINY])
        assert [c.token_ids for c in done] != [c.token_ids for c in plain], "nothing was rounded"


def test_a_snapshot_goes_through_a_file(tmp_path):
    model = tiny_model(num_layers=1)
    engine = Engine(model, **one_size(1), kv_cache=Int3())
    request = engine.submit(list(range(3, 20)), greedy(8))
    engine.step(), engine.step()
    taken = engine.snapshot(request)
    snapshots.save_snapshot(tmp_path / "one", taken)
    back = snapshots.load_snapshot(tmp_path / "one", [Int3()])
    assert back.cache[0].k.format == Int3()
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(taken), strict=True):
        np.testing.assert_array_equal(one, other)
    again = engine.resume(back, greedy(9 + len(taken.tokens) - 18))
    ends = {event.id: event.completion.token_ids for event in engine.run() if event.completion}
    assert (*taken.tokens[17:].tolist(), *ends[again])[:8] == ends[request]
    with pytest.raises(SnapshotError, match="unknown KV format 'Int3-g8'"):
        snapshots.load_snapshot(tmp_path / "one")


def test_an_evaluation_has_it_but_keeps_no_progress_of_it(tmp_path):
    model, protocol = tiny_model(num_layers=1), Protocol("tiny", context=16)
    ids = list(range(3, 40))
    own, plain = (evaluate(model, ids, protocol, kv_cache=kv_cache) for kv_cache in (Int3(), None))
    assert own.perplexity != plain.perplexity
    with pytest.raises(EvaluationError, match="resume takes KV formats by name"):
        evaluate(model, ids, protocol, kv_cache=Int3(), resume=tmp_path / "progress")


def test_what_it_does_not_fit_is_named():
    model = tiny_model(num_layers=1, head_dim=12)
    with pytest.raises(ConfigError, match="KV format Int3-g8 does not fit the head dim 12"):
        Engine(model, max_slots=1, kv_cache=Int3())
