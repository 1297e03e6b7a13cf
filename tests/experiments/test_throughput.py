"""The table of whole batches: its floors, its steps, and a run at toy size."""

import argparse
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jllm
from experiments import throughput
from experiments.steps.batches import WholeBatch
from experiments.steps.devices import Ceilings
from experiments.steps.floors import Work, make_floor, step_work
from experiments.steps.timer import StepTimer, page_bytes
from experiments.throughput import Bench, bars, engine_steps, main, milliseconds, parse_args, parse_case, read_table
from jllm.files.hf_config import load_config
from jllm.model.param_specs import init_params
from jllm.model.params import tree_bytes
from jllm.quant.quantize import quantize

# Rates by which the figures below were worked out by hand.
H200 = Ceilings(4.55e12, {None: 813e12, "int8": 1673e12, "fp8": 1673e12}, 652e12, "by hand")
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "torch_dtype": "float32", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def abstract(scheme: str, name: str = "llama-2-7b"):
    config = load_config(f"configs/{name}.json")
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.bfloat16))
    return params if scheme == "bf16" else quantize(params, scheme), config


# (batch, input, output): decode floors with a bf16 and an int8-g8 cache, and prefill's, in ms. By hand: 6.476e9 weights
# in layers and 0.131e9 in the head, of 16 bits, at 4.55 TB/s and 813 TFLOP/s; K and V of 524,288 or 327,680 bytes a
# token; attention's 524,288 operations for a query and a key at 652 TFLOP/s.
FLOORS = {
    (1, 8, 256): (2.920, 2.914, 2.905),
    (64, 8, 256): (3.907, 3.531, 8.251),
    (512, 8, 256): (16.346, 13.337, 65.714),
    (1, 1024, 1024): (3.081, 3.015, 16.79),
    (80, 1024, 1024): (17.062, 11.754, 1338.9),
}


def test_floors_of_7b_in_16_bits():
    params, config = abstract("bf16")
    floor = make_floor(params, config, H200)
    for key, (bf16, int8, prefill) in FLOORS.items():
        case = WholeBatch(*key)
        for kv, ms in (("bf16", bf16), ("int8-g8", int8)):
            each = page_bytes(config, params.dtype, 16, kv) / 16
            assert 1e3 * floor.of(case.decode_work, each) == pytest.approx(ms, rel=1e-3)
        prompts = step_work(0, 0, [(0, case.input, True)] * case.batch)
        assert 1e3 * floor.of(prompts, each) == pytest.approx(prefill, rel=1e-3)


def test_floors_of_7b_in_8_bits():
    """By hand, of 6.476e9 weights of a byte, with 0.3 % of scales besides, at 1,673 TOP/s; the head has 16 bits."""
    params, config = abstract("w8a8-all")
    floor = make_floor(params, config, H200)
    each = page_bytes(config, params.dtype, 16, "int8-g8") / 16
    for (batch, context), ms in {(1, 136): 1.491, (128, 136): 2.735, (512, 136): 9.144}.items():
        assert 1e3 * floor.of(step_work(batch, batch * context), each) == pytest.approx(ms, rel=3e-3)


def test_floors_of_a_mixture_count_the_experts_that_rows_touch():
    """By hand: 8 of 128 experts a row, each [1536, 2048] and [2048, 768], in 48 layers."""
    params, config = abstract("bf16", "qwen3-30b-a3b")
    floor = make_floor(params, config, H200)
    expert = 2 * (1536 * 2048 + 2048 * 768)
    others = tree_bytes(params) - tree_bytes(params.embed) - 48 * 128 * expert
    for rows, touched in ((1, 8.0), (17, 85.28), (100, 127.8)):
        products, _ = floor.parts(step_work(rows, 0), 0.0)
        assert products == pytest.approx((others + 48 * touched * expert) / H200.bandwidth, rel=1e-3)


def test_the_published_table_agrees_with_itself():
    table = read_table()
    assert len(table) == len({(r["batch"], r["input"], r["output"]) for r in table}) == 20
    for row in table:
        ms = row["prefill_ms"] + row["output"] * row["decode_ms"]
        assert 1e3 * row["batch"] * row["output"] / ms == pytest.approx(row["tokens_s"], rel=0.002)


@pytest.mark.parametrize(
    ("case", "prompts", "tokens", "steps"),
    [
        (WholeBatch(1, 8, 256), 1, 8, 1),
        (WholeBatch(512, 8, 256), 512, 8, 1),
        (WholeBatch(768, 8, 256), 384, 8, 2),
        (WholeBatch(80, 1024, 1024), 4, 1024, 20),
        (WholeBatch(3, 9000, 16), 1, 3000, 9),
        (WholeBatch(7, 1500, 16), 2, 1500, 4),
    ],
)
def test_prefill_takes_every_prompt_token_once(case, prompts, tokens, steps):
    size = case.prefill(4096)
    assert (size.prompts, size.tokens) == (prompts, tokens)
    assert size.layout.bucket.tokens <= 4096
    spans = size.spans(case)
    assert len(spans) == steps
    seen = [(slot, at + i) for chunks in spans for slot, at, n in chunks for i in range(n)]
    assert len(seen) == len(set(seen)) == case.batch * case.input
    assert {slot for slot, _ in seen} == set(range(case.batch))


def test_the_work_of_a_row_by_hand():
    """Two prompts of 40 in chunks of 20: the second chunk reads the first one's keys too, and the head runs on the last
    token alone. A decoding row has 40 and half of 8 tokens to read."""
    case = WholeBatch(2, 40, 8)
    first, last = Work(0, 20, 0, 0, 20, 20 * 21 / 2), Work(0, 20, 1, 0, 40, 20 * 20 + 20 * 21 / 2)
    assert case.prefill(32).work(case) == [first, last, first, last]
    assert case.decode_work == Work(2, 0, 2, 88)
    whole = WholeBatch(5, 8, 256)
    assert whole.prefill(32).work(whole) == [Work(0, 24, 3, 0, 24, 3 * 36), Work(0, 16, 2, 0, 16, 2 * 36)]


def test_a_run_writes_the_table(tiny, tmp_path, capsys):
    command = ["--config", str(tiny), "--dtype", "float32", "--rows", "1x8x100", "2x40x8", "--step-tokens", "32"]
    command += ["--steps", "2", "--seconds", "0.02", "--bandwidth", "1e6"]
    status = main([*command, "--repeats", "1", "--results", str(tmp_path), "--json"])
    assert status == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["complete"]
    assert "PPL.LLM" in document["h800"]
    assert document["experiment"] == "throughput_tiny_bf16_kv-float32"
    assert [(r["batch"], r["input"], r["output"], r["prefill_steps"]) for r in document["rows"]] == [
        (1, 8, 100, 1),
        (2, 40, 8, 4),
    ]
    config = load_config(tiny)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.float32))
    floor = make_floor(shapes, config, replace(H200, bandwidth=1e6))
    each = 2 * 2 * 16 * 4  # bytes of a token's K and V: one layer, two heads of 16 floats
    long = 2 * (floor.of(Work(0, 20, 0, 0, 20, 210), each) + floor.of(Work(0, 20, 1, 0, 40, 610), each))
    floors = [
        (floor.of(Work(0, 8, 1, 0, 8, 36), each), floor.of(Work(1, 0, 1, 58), each)),
        (long, floor.of(Work(2, 0, 2, 88), each)),
    ]
    for row, (prefill, decode) in zip(document["rows"], floors, strict=True):
        assert (row["prefill_floor_ms"], row["decode_floor_ms"]) == pytest.approx(
            (1e3 * prefill, 1e3 * decode), rel=1e-4
        )
        assert row["floor_fraction"] == pytest.approx(row["decode_floor_ms"] / row["decode_ms"], rel=1e-3)
        assert row["prefill_floor_fraction"] == pytest.approx(row["prefill_floor_ms"] / row["prefill_ms"], rel=1e-3)
        ms = row["prefill_ms"] + row["output"] * row["decode_ms"]
        assert row["tokens_s"] == pytest.approx(1e3 * row["batch"] * row["output"] / ms, rel=0.01)
        for name in ("prefill_ms", "decode_ms"):
            assert row[name] == row[f"{name}_median"] == row[f"{name}_most"], "of one repeat"
    assert not document["bars"], "toy sizes decide nothing"
    assert json.loads((tmp_path / next(p.name for p in tmp_path.glob("throughput_*"))).read_text()) == document


def test_an_engines_step_is_the_slope_between_two_outputs(tiny, monkeypatch):
    """Counts steps as seconds: the longer outputs take 240 steps more, and prompts cancel."""
    args = parse_args(["--config", str(tiny), "--dtype", "float32", "--page-size", "8", "--engine", "--repeats", "1"])
    config = replace(load_config(tiny), context=512)
    done = []

    def stepped(engine, step=jllm.Engine.step):
        done.append(engine)
        return step(engine)

    monkeypatch.setattr(jllm.Engine, "step", stepped)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: float(len(done)))
    cases = [WholeBatch(1, 8, 256), WholeBatch(3, 8, 256), WholeBatch(2, 40, 8)]
    found = engine_steps(init_params(config, jax.random.key(0), jnp.float32), config, cases, args)
    assert found == {1: pytest.approx(1.0), 3: pytest.approx(1.0)}
    assert engine_steps({}, config, cases[2:], args) == {}


def test_steps_are_timed_for_long_about_the_middle_of_the_output(tiny, monkeypatch):
    args = parse_args(["--config", str(tiny), "--dtype", "float32", "--step-tokens", "32", "--seconds", "0.6"])
    config = load_config(tiny)
    params = init_params(config, jax.random.key(0), jnp.float32)
    cases = [WholeBatch(1, 8, 100), WholeBatch(2, 40, 8), WholeBatch(3, 4, 90)]
    bench = Bench(params, config, cases, args)
    real, calls = StepTimer.seconds, []

    def time(self, step, buffers, tokens):  # ten milliseconds a step, but for what the first has besides
        before = self.state.slots.length.tolist()
        real(self, step, buffers[:2], tokens)
        assert self.state.slots.length.tolist() == before, "the slots are as before"
        calls.append((len(buffers), before))
        return 0.01 * len(buffers) + (5.0 if len(calls) == 1 else 0)

    monkeypatch.setattr(StepTimer, "seconds", time)
    for case, steps in zip(cases, (60, 10, 60)):  # of 100, more than its 8 as --steps says so, of 90
        calls.clear()
        assert bench.decode(case) == pytest.approx([0.01] * args.repeats)
        assert [n for n, _ in calls] == [1, 10, *[steps] * args.repeats]
        assert calls[-1][1][: case.batch] == [max(1, case.context - steps // 2)] * case.batch
    calls.clear()
    assert bench.prefill(cases[1]) == pytest.approx([0.04] * args.repeats)  # four chunks
    assert [n for n, _ in calls] == [4, 4, *[4 * 15] * args.repeats]


def test_a_row_says_how_far_its_repeats_are_apart():
    found = milliseconds("decode_ms", [0.004, 0.002, 0.003, 0.010])
    assert found == pytest.approx({"decode_ms": 2.0, "decode_ms_median": 3.5, "decode_ms_most": 10.0})


def test_bad_arguments_are_named(tiny, tmp_path, capsys):
    assert main(["--config", str(tiny), "--rows", "1x100x100", "--results", str(tmp_path)]) == 2
    assert "the model's context is 128" in capsys.readouterr().err
    for text in ("1x2", "0x8x8", "axbxc"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not BATCHxINPUTxOUTPUT"):
            parse_case(text)
    for text in ("0", "-1", "inf", "nan", "soon"):
        with pytest.raises(SystemExit):
            parse_args(["--seconds", text])
        assert "is not a positive number" in capsys.readouterr().err


def test_bars_by_scheme_and_batch():
    row = {"model": "m", "kv": "int8-g8", "batch": 256, "input": 8, "output": 256, "floor_fraction": 0.78}
    row |= {"prefill_floor_fraction": 0.7}
    found = list(bars([{"scheme": "bf16", **row}, {"scheme": "w8a8", **row}, {"scheme": "nf4", **row}]))
    assert [(b["bar"], b["met"]) for b in found] == [(0.80, False), (0.78, False), (0.75, True)]
    (llama3,) = bars([row | {"scheme": "bf16", "kv": "bf16", "model": "llama-3-8b", "input": 1}])
    assert (llama3["bar"], llama3["met"]) == (0.82, False)
    assert not list(bars([{"scheme": "bf16", "error": "lost"}]))
