"""Perplexity of each protocol against its definition in float64 numpy, divergence, parity, and what is refused."""

import re
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
import jllm.analysis.evaluate
from jllm.analysis import scoring
from jllm.analysis.evaluate import Evaluation, Part, evaluate, record
from jllm.analysis.protocols import PROTOCOLS, Protocol, Window, find_protocol, windows_of
from jllm.errors import EvaluationError
from jllm.quant.quantize import quantize
from tests.parity import OPTIONS, PARITY, expected
from tests.tiny import greedy, log_softmax, serve, tiny_model

rng = np.random.default_rng(5)
TEXT = "".join(rng.choice(list("abcdefgh ij\nklmno"), size=151))
TEXTS = [TEXT[:9], TEXT[9:110], TEXT[110:]]
SMALL = {"max_slots": 3, "max_step_tokens": 16, "page_size": 8}


@dataclass(frozen=True)
class Letters:
    """One token a character; BOS is 1, and added where files ask for it."""

    bos_id: int | None = 1
    eos_ids: tuple[int, ...] = (2,)
    shift: int = 3

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        return [1] * add_bos + [ord(c) % 90 + self.shift for c in text]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def numpy_logprobs(model, ids) -> np.ndarray:
    """[T, V] in float64: the formulas once more, no code in common with the model."""
    c, p = model.config, jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    H, K, D, T = c.num_heads, c.num_kv_heads, c.head_dim, len(ids)

    def norm(x, w):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * w

    turn = np.exp(1j * np.outer(np.arange(T), c.rope_theta ** (-np.arange(0, D, 2) / D)))

    def rotate(x):  # one head, as complex numbers
        z = (x[:, : D // 2] + 1j * x[:, D // 2 :]) * turn
        return np.concatenate([z.real, z.imag], axis=1)

    x = p.embed[ids]
    for layer in p.layers:
        q, k, v = np.split(norm(x, layer.attention.norm) @ layer.attention.qkv.T, [H * D, (H + K) * D], axis=1)
        heads = []
        for h in range(H):
            own, group = slice(h * D, h * D + D), slice(h * K // H * D, h * K // H * D + D)
            scores = rotate(q[:, own]) @ rotate(k[:, group]).T / np.sqrt(D)
            scores[np.triu_indices(T, 1)] = -np.inf
            heads.append(np.exp(log_softmax(scores)) @ v[:, group])
        x = x + np.concatenate(heads, axis=1) @ layer.attention.o.T
        gate, up = np.split(norm(x, layer.mlp.norm) @ layer.mlp.gate_up.T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.mlp.down.T
    return log_softmax(norm(x, p.norm) @ p.head.T)


def numpy_nats(model, inputs, targets) -> np.ndarray:
    """Of the last len(targets) rows."""
    rows = numpy_logprobs(model, inputs)[-len(targets) :]
    return -rows[np.arange(len(targets)), targets]


# Each protocol as those write it down who use it.


def as_gptq(model, L) -> float:
    ids = model.tokenizer.encode("\n\n".join(TEXTS))
    losses = []
    for i in range(len(ids) // L):
        window = ids[i * L : (i + 1) * L]
        losses.append(numpy_nats(model, window[:-1], window[1:]).mean() * L)
    return np.exp(sum(losses) / (len(losses) * L))


def as_transformers(model, L, stride) -> float:
    ids = model.tokenizer.encode("\n\n".join(TEXTS))
    nats, previous_end = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + L, len(ids))
        window, labels = ids[begin:end], np.array(ids[begin:end])
        labels[: -(end - previous_end)] = -100
        loss = numpy_nats(model, window, [*window[1:], 0])  # logits and labels are shifted against each other
        nats += [x for x, label in zip(loss[:-1], labels[1:], strict=True) if label != -100]
        previous_end = end
        if end == len(ids):
            break
    return np.exp(np.mean(nats))


def as_lm_eval(model, L, word) -> float:
    nats, tokens, words = 0.0, 0, 0
    for text in TEXTS:
        ids = model.tokenizer.encode(text, add_bos=False)
        first = min(L, len(ids))
        nats += numpy_nats(model, [1, *ids[: first - 1]], ids[:first]).sum()
        predicted = first
        while predicted < len(ids):
            count = min(len(ids) - predicted, L)
            end = predicted + count
            nats += numpy_nats(model, ids[end - L - 1 : end - 1], ids[end - count : end]).sum()
            predicted = end
        tokens, words = tokens + len(ids), words + len(re.split(r"\s+", text))
    return np.exp(nats / (words if word else tokens))


def small(name: str, context: int = 24) -> Protocol:
    protocol = PROTOCOLS[name]
    return replace(protocol, context=context, stride=10 if protocol.stride else context)


DEFINITIONS = {
    "wikitext2-2048": partial(as_gptq, L=24),
    "wikitext2-4096": partial(as_gptq, L=24),
    "windows-512": partial(as_gptq, L=24),
    "strided-512": partial(as_transformers, L=24, stride=10),
    "document": partial(as_lm_eval, L=24, word=False),
    "document-word": partial(as_lm_eval, L=24, word=True),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_perplexity_is_what_the_protocol_says(name, x64):
    model = tiny_model("float64", tokenizer=Letters(), num_layers=1)
    got = evaluate(model, TEXTS, small(name), **SMALL)
    assert got.perplexity == pytest.approx(DEFINITIONS[name](model), rel=1e-10)
    assert got.as_row()["protocol"] == name
    assert len(got.parts) == 3 or PROTOCOLS[name].joined


def test_in_float32():
    model = tiny_model(tokenizer=Letters(), num_layers=1)
    got = evaluate(model, TEXTS, small("document"), **SMALL)
    assert got.perplexity == pytest.approx(as_lm_eval(model, 24, word=False), rel=1e-6)


FAULTS = {
    "start": lambda w: replace(w, start=w.start + 1, scored=max(w.scored, w.start + 2)),
    "scored": lambda w: replace(w, scored=w.scored + 1),
    "stop": lambda w: replace(w, stop=w.stop - 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_windows_off_by_one_are_noticed(fault, x64, monkeypatch):
    model, protocol = tiny_model("float64", tokenizer=Letters(), num_layers=1), small("document")
    monkeypatch.setattr(jllm.analysis.evaluate, "windows_of", lambda *a: [FAULTS[fault](w) for w in windows_of(*a)])
    got = evaluate(model, TEXTS, protocol, **SMALL).perplexity
    assert abs(got / as_lm_eval(model, 24, word=False) - 1) > 1e-3


@pytest.mark.parametrize("name", ["strided-512", "document"])
@pytest.mark.parametrize("length", [2, 9, 10, 11, 24, 25, 26, 33, 34, 35, 49, 50, 100])
def test_every_token_is_scored_once(name, length):
    protocol = small(name)
    windows = windows_of(length, protocol)
    scored = [t for w in windows for t in range(w.scored, w.stop)]
    assert scored == list(range(1, length))
    assert all(0 <= w.start < w.scored < w.stop <= w.start + 24 + protocol.lead for w in windows)


def test_full_windows_alone():
    assert windows_of(23, small("windows-512")) == []
    assert windows_of(71, small("windows-512"), 4) == [Window(4, 0, 1, 24), Window(4, 24, 25, 48)]


@pytest.mark.parametrize("family", ["llama3.1", "qwen2-window", "qwen3"])
def test_agrees_with_transformers(family):
    """Its logits, as recorded from the start of three prompts (tests/data/make_parity.py)."""
    cases = expected(family)
    want = [log_softmax(x.astype(np.float64))[np.arange(len(p) - 1), p[1:]] for p, x, _ in cases]
    got = evaluate(jllm.load(PARITY / family), [p for p, _, _ in cases], "document", **SMALL)
    assert got.perplexity == pytest.approx(np.exp(-np.concatenate(want).mean()), rel=1e-4)


@pytest.mark.parametrize("name", [name for name in PROTOCOLS if PROTOCOLS[name].unit == "token"])
def test_first_windows_agree_with_transformers(name):
    prompt, logits, _ = expected("llama3")[-1]
    want = log_softmax(logits.astype(np.float64))[np.arange(len(prompt) - 1), prompt[1:]].mean()
    got = evaluate(jllm.load(PARITY / "llama3"), prompt, small(name, len(prompt)), **SMALL)
    assert got.perplexity == pytest.approx(np.exp(-want), rel=1e-4)


def test_is_what_the_engine_serves():
    model, kv = tiny_model(num_layers=1), "k=int8-g8,v=int4-g16"
    prompts = [[1, *(rng.integers(3, 97, size=n).tolist())] for n in (40, 7, 25)]
    ask = greedy(1, prompt_logprobs=True)
    done = serve(model, prompts, [ask] * 3, kv_cache=kv, **OPTIONS)
    want = [np.sum(np.asarray(c.prompt_logprobs)) for c in done]
    parts = evaluate(model, prompts, "document", kv_cache=kv, **SMALL).parts
    np.testing.assert_allclose([-p.nats for p in parts], want, rtol=2e-6)


def test_same_figures_again_and_whatever_the_batch(x64):
    model, other = (tiny_model("float64", seed=s, tokenizer=Letters(), num_layers=1) for s in (0, 1))
    run = partial(evaluate, model, TEXTS, small("strided-512"), reference=other, kv_cache="int8-g8")
    first = run(**SMALL)
    assert run(**SMALL) == first
    recorded = record(other, TEXTS, small("strided-512"), **SMALL)
    assert run(reference=recorded, **SMALL) == first
    again = run(reference=recorded, max_slots=2, max_step_tokens=50, page_size=32)
    for name in ("perplexity", "kl", "top1"):
        assert again.measure(name) == pytest.approx(first.measure(name), rel=1e-12)


def test_divergence_and_agreement(x64):
    model, other = (tiny_model("float64", seed=s, tokenizer=Letters(), num_layers=1) for s in (0, 1))
    got = evaluate(model, TEXTS[:2], small("document"), reference=other, **SMALL)
    kl, same = [], []
    for text in TEXTS[:2]:
        ids = Letters().encode(text)
        for window in windows_of(len(ids), small("document")):
            inputs = ids[window.start : window.stop - 1]
            p, q = (numpy_logprobs(m, inputs)[window.scored - window.stop :] for m in (other, model))
            kl += (np.exp(p) * (p - q)).sum(axis=1).tolist()
            same += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    assert got.kl == pytest.approx(np.mean(kl), rel=1e-9)
    assert got.top1 == np.mean(same)
    alone = [evaluate(m, TEXTS[:2], small("document"), **SMALL).perplexity for m in (model, other)]
    assert got.perplexity == pytest.approx(alone[0], rel=1e-13)
    assert got.added == pytest.approx(alone[0] / alone[1] - 1, rel=1e-12)


def test_a_model_does_not_differ_from_itself():
    model = tiny_model(tokenizer=Letters(), num_layers=1)
    got = evaluate(model, TEXTS, small("document"), reference=model, **SMALL)
    assert (got.added, got.kl, got.top1) == (0.0, 0.0, 1.0)


def test_small_divergences_survive_float32():
    logits = rng.normal(size=(50, 1000)) * 3
    near = logits + 1e-3 * rng.normal(size=logits.shape)
    got = scoring.difference(*(jnp.asarray(x, jnp.float32) for x in (logits, near)))["kl"]
    p, q = log_softmax(logits), log_softmax(near)
    np.testing.assert_allclose(got, (np.exp(p) * (p - q)).sum(axis=1), rtol=2e-2)
    assert got.min() >= 0


def test_divergences_beyond_what_a_float_holds():
    """Probabilities of 1e-48 by one model and of a half by the other, which float32's exp has no number for."""
    near, far = np.array([[0.0, -110.0, 3.0, 3.0]]), np.array([[-9.0, 0.0, -1.0, 3.0]])
    for reference, logits in ((near, far), (far, near), (3 * far, -3 * near)):
        got = scoring.difference(*(jnp.asarray(x, jnp.float32) for x in (reference, logits)))["kl"]
        p, q = log_softmax(reference), log_softmax(logits)
        np.testing.assert_allclose(got, (np.exp(p) * (p - q)).sum(axis=1), rtol=1e-5)


def one_step(model, **options):
    """Hidden states and scores of 256 tokens by a model and by itself as its reference, as score_windows makes them."""
    reader, windows, sizes = scoring.Reader(model, "int8-g8"), [Window(0, 0, 1, 300)], scoring.Sizes(1, 256, 16, 19)
    chunks = next(scoring.plan(windows, sizes))
    batch, targets = scoring.pack(chunks, [np.zeros(300, np.int32)], windows, sizes)

    def step(model, batch, cache):
        x, _ = replace(reader, model=model).read(batch, chunks, cache, options.get("backend"))
        heads, configs = (replace(model.params, layers=()),) * 2, (model.config,) * 2
        return scoring.score_rows(heads, (x, x), targets, configs=configs, backend=options.get("backend"))

    return jax.jit(lambda params, *args: step(replace(model, params=params), *args)).trace(
        model.params, batch, reader.begin(sizes)
    )


def test_no_logits_of_all_rows_at_once():
    text = one_step(tiny_model(num_layers=1)).lower().as_text()
    assert "tensor<128x97xf32>" in text
    assert "256x97x" not in text


def test_lowers_to_the_kernels_that_serve():
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128}
    model = tiny_model("bfloat16", vocab_size=512, num_layers=1, **sizes)
    quantized = replace(model, params=quantize(model.params, "w8a8-all"))
    kernels = str(one_step(quantized, backend="mosaic").jaxpr)  # that each of them lowers, its own tests say
    for name in ("cache_update", "prefill_attention", "norm_quant", "silu_mul_quant", "gemm_tall", "warpgroup"):
        assert name in kernels


def test_intervals():
    protocol = small("document")
    parts = tuple(Part(10, 4, 10.0 + i, 9.0, 0.1 * i, i) for i in range(8))
    result = Evaluation(protocol, parts)
    low, high = result.interval("perplexity")
    assert low < result.perplexity < high
    assert (low, high) == result.interval("perplexity") != result.interval("perplexity", seed=1)
    assert result.interval("kl")[0] < result.kl < result.interval("kl")[1]
    drawn = np.random.default_rng(0).normal(size=200)
    many = Evaluation(protocol, tuple(Part(10, 4, 10.0, 9.0, kl, 1) for kl in drawn.tolist()))
    for level, z in ((0.95, 1.96), (0.5, 0.674)):  # of a mean, from the normal distribution
        half = z * drawn.std() / 200**0.5 / 10
        assert many.interval("kl", level=level) == pytest.approx((many.kl - half, many.kl + half), abs=0.1 * half)
    assert result.added == pytest.approx(np.expm1(0.45))
    same = Evaluation(protocol, parts[:1] * 5)
    assert same.interval("top1") == (0.0, 0.0)
    worse = Evaluation(protocol, tuple(replace(part, nats=part.nats + 1, kl=part.kl + 0.1) for part in parts))
    assert worse.interval("kl", over=result) == pytest.approx((0.01, 0.01))  # of each draw by as much a token
    assert worse.interval("added", over=result) == pytest.approx((np.expm1(0.1),) * 2)
    assert worse.interval("kl")[0] < result.interval("kl")[1], "which the intervals of either hide"
    with pytest.raises(EvaluationError, match="evaluations of the same texts"):
        result.interval("kl", over=Evaluation(protocol, parts[:4]))
    with pytest.raises(EvaluationError, match="at least 2 parts, not 1$"):
        Evaluation(protocol, parts[:1]).interval("kl")
    with pytest.raises(EvaluationError, match="kl takes a reference model"):
        _ = Evaluation(protocol, (Part(1, 1, 1.0),)).kl


def test_a_recorded_reference_stands_for_its_own_tokens_only():
    model = tiny_model(tokenizer=Letters(), num_layers=1)
    recorded = record(model, TEXTS, small("document"), **SMALL)
    for texts, protocol, message in (
        (TEXTS[:2], "document", "recorded on other tokens than these"),
        (TEXTS, "strided-512", "recorded by protocol document (context 24, stride 24), not by strided-512 (context 24"),
    ):
        with pytest.raises(EvaluationError, match=re.escape(message)):
            evaluate(model, texts, small(protocol), reference=recorded, **SMALL)


def other_vocabulary():
    return tiny_model(vocab_size=80, num_layers=1)


REFUSED = {
    "unknown protocol 'wikitext-2048'; near ones: wikitext2-2048": {"protocol": "wikitext-2048"},
    "unknown protocol 'zzz'; known are wikitext2-2048, ": {"protocol": "zzz"},
    "windows of 2048 tokens, but the model's context is 128": {"protocol": "wikitext2-2048"},
    "protocol strided-512: stride must be in 1 .. context = 128, not 512": {"protocol": "strided-512"},
    "protocol windows-512: the text has 156 tokens, a window takes 160": {
        "protocol": replace(PROTOCOLS["windows-512"], context=160),
        "model": tiny_model(context=160, tokenizer=Letters(), num_layers=1),
    },
    "protocol document: text 1 has 1 tokens, a window takes 2": {"texts": ["ab", ""]},
    "token id 97 of the text is not in [0, 97), the model's vocabulary": {"texts": [3, 97]},
    "token ids must be integers": {"texts": [[3.5, 4.5]]},
    "at least one text": {"texts": []},
    "all are strings or all": {"texts": ["ab", [3, 4]]},
    "words can be counted in strings": {"protocol": "document-word", "texts": [3, 4]},
    "a text needs a tokenizer": {"model": tiny_model(num_layers=1)},
    "the tokenizer has neither": {"model": tiny_model(tokenizer=Letters(None, ()))},
    "vocabularies differ: 97 and 80": {"reference": other_vocabulary()},
    "their tokenizers make different tokens": {"reference": tiny_model(tokenizer=Letters(shift=4), num_layers=1)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    given = {"model": tiny_model(tokenizer=Letters()), "texts": TEXTS, "protocol": "document"} | REFUSED[message]
    with pytest.raises(EvaluationError) as error:
        evaluate(**given, **SMALL)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"last": "keep"}, "last must be drop or short or full, not 'keep'"),
        ({"context": 1}, "context must be at least 2"),
        ({"context": 8, "stride": 9}, "stride must be in 1 .. context = 8, not 9"),
        ({"lead": 2}, "lead must be 0 or 1"),
        ({"unit": "word"}, "words can be counted only"),
    ],
)
def test_protocols_that_make_no_sense(fields, message):
    with pytest.raises(EvaluationError, match=f"^protocol mine: {message}"):
        Protocol("mine", **fields)


def test_logits_that_are_not_finite():
    model = tiny_model(num_layers=1)
    broken = replace(model, params=replace(model.params, embed=model.params.embed.at[9].set(jnp.nan)))
    with pytest.raises(EvaluationError, match="not finite within tokens 0 .. 4 of text 0$"):
        evaluate(broken, [3, 4, 9, 5], "document", **SMALL)


def test_a_protocol_of_ones_own():
    assert find_protocol(Protocol("mine", context=8)).resolve(tiny_model(num_layers=1).config).stride == 8
