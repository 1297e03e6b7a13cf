"""The table of a step's kernels, from events made by hand, and the steps that are profiled."""

import json

import jax
import numpy as np
import pytest

from experiments import step_profile
from experiments.step_profile import (
    SKIPPED,
    kind_of,
    parse_args,
    serve_steps,
    serving,
    serving_sizes,
    steady,
    steps_of,
    table,
    totals,
)
from pallas_kernels.bench.measure import Event
from tests.experiments.test_decode_step import TOY
from tests.tiny import tiny_model


def test_rows_add_up_to_the_span():
    events = [
        Event("gemm_fusion_dot_7", 100.0, 6.0),
        Event("decode_attention_3", 107.0, 2.0),
        Event("gemm_fusion_dot_12", 110.0, 8.0),
        Event("wrapped_add", 119.0, 1.0),
    ]
    rows = list(table(events, steps=2))
    assert [(row["kernel"], row["kind"], row.get("calls"), row["us"]) for row in rows] == [
        ("gemm_fusion_dot", "matmul", 1.0, 7.0),
        ("decode_attention", "attention", 0.5, 1.0),
        ("wrapped_add", "rest", 0.5, 0.5),
        ("(none)", "gap", None, 1.5),
    ]
    assert sum(row["us"] for row in rows) == pytest.approx((120 - 100) / 2)
    assert sum(row["share"] for row in rows) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_64x8", "matmul"),
        ("cache_update_kernel", "cache"),
        ("merge_splits", "attention"),
        ("norm_quant_1", "norm, activation"),
        ("gemm_skinny_mosaic_gpu_kernel", "matmul"),
        ("swiglu_mosaic_gpu_kernel", "matmul"),
        ("weight_only_matmul_mosaic_gpu_kernel", "matmul"),
        ("weight_only_row_gated_mosaic_gpu_kernel", "matmul"),
        ("silu_mul_quant_mosaic_gpu_kernel", "norm, activation"),
        ("prefill_attention_mosaic_gpu_kernel", "attention"),
        ("sample_mosaic_gpu_kernel", "sampling"),
        ("loop_multiply_fusion", "rest"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_totals_are_of_each_kind_but_the_gap():
    events = [
        Event("gemm_tall_1", 0.0, 6.0),
        Event("nvjet_2", 6.0, 3.0),
        Event("sample", 10.0, 1.0),
        Event("gemm_tall_3", 11.0, 5.0),
    ]
    found = list(totals(table(events, steps=2)))
    assert [(row["kernel"], row["kind"], row["calls"], row["us"]) for row in found] == [
        ("(all)", "matmul", 1.5, 7.0),
        ("(all)", "sampling", 0.5, 0.5),
    ]
    assert [row["share"] for row in found] == pytest.approx([14 / 16, 1 / 16])


def test_what_overlaps_is_busy_once():
    """A copy within a kernel, and one that outlasts it, neither in order."""
    events = [
        Event("copy", 8.0, 4.0),
        Event("copy", 1.0, 2.0),
        Event("gemm_tall", 0.0, 5.0),
        Event("gemm_tall", 6.0, 4.0),
    ]
    (gap,) = [row for row in table(events, steps=2) if row["kind"] == "gap"]
    assert (gap["us"], gap["share"]) == (0.5, pytest.approx(1 / 12, abs=1e-4))


def test_an_engines_first_steps_and_what_follows_the_last_are_not_counted():
    """Each step is a copy, two kernels of one name and the sampler; the first wait for the profiler, and after the last
    its tokens are copied."""
    begins = [0.0, 100.0, 150.0, 160.0, 170.0, 180.0]
    events = [Event("MemcpyH2D", 0.0, 1.0)] + [Event("MemcpyH2D", begin + 0.5, 1.0) for begin in begins[2:]]
    for begin in begins:
        events += [Event("gemm", begin + 2, 3.0), Event("gemm", begin + 5, 2.0), Event("sample", begin + 7, 2.0)]
    events.append(Event("MemcpyH2D", 300.0, 1.0))
    found = steady(events, steps=6)
    assert sorted(event.start_us for event in found if event.name == "sample") == [157.0, 167.0, 177.0]
    (gap,) = [row for row in table(found, steps=3) if row["kind"] == "gap"]
    assert gap["us"] == 2  # of 10 a step, 8 are kernels and a copy
    with pytest.raises(RuntimeError, match="once in each of 5"):
        steady(events, steps=5)


def test_every_slot_of_a_profiled_step_makes_a_token():
    model = tiny_model()
    decoding = steps_of(model.params, model.config, 3, parse_args(["--steps", "2", "--context", "20"]))
    prompts = steps_of(model.params, model.config, 3, parse_args(["--steps", "2", "--kind", "prefill", "--input", "5"]))
    assert (np.asarray(decoding()) >= 0).all()
    first = np.asarray(prompts())
    assert (first >= 0).all()
    np.testing.assert_array_equal(prompts(), first)  # the same prompts again


@pytest.mark.parametrize(("batch", "context"), [(3, 20), (1, 5), (70, 3)])
def test_an_engine_whose_slots_all_decode_is_profiled(batch, context):
    model, args = tiny_model(), parse_args(["--context", str(context), "--steps", "4"])
    with serving(model.params, model.config, batch, args) as engine:
        for _ in range(3):
            before = engine.metrics()["output_tokens"]
            jax.block_until_ready(serve_steps(engine, 4))
            assert engine.metrics()["output_tokens"] == before + 4 * batch
            assert engine.metrics()["running"] == batch


def test_the_profile_of_a_full_engine_fits_a_device():
    """7B in 16 bits beside 512 slots: 8 MiB a page."""
    options, _ = serving_sizes(512, parse_args(["--context", "136", "--steps", "16"]))
    assert options["num_pages"] * 8 < 80 * 1024


@pytest.mark.parametrize(
    ("kind", "length"), [("decode", ("context", 20)), ("prefill", ("input", 5)), ("serve", ("context", 20))]
)
def test_a_run_writes_rows_and_totals(kind, length, tmp_path, monkeypatch):
    def timeline(run, python):
        jax.block_until_ready(run())
        begins = range(0, 10 * (1 + SKIPPED if kind == "serve" else 1), 10)
        return [event for t in begins for event in (Event("gemm_tall", t, 3.0), Event("sample", t + 4, 1.0))]

    monkeypatch.setattr(step_profile, "timeline", timeline)
    config = tmp_path / "toy.json"
    config.write_text(json.dumps(TOY))
    options = ["--config", str(config), "--kind", kind, "--batch", "2", "--dtype", "float32"]
    options += [f"--{length[0]}", str(length[1]), "--steps", "1", "--results", str(tmp_path)]
    if kind == "decode":  # quantizing is the same for all
        assert step_profile.main([*options, "--scheme", "w8a8"]) == 0
        (file,) = tmp_path.glob("step_profile*-w8a8-*.json")
        assert all(row["scheme"] == "w8a8" for row in json.loads(file.read_text())["rows"])
        file.unlink()
    assert step_profile.main(options) == 0
    (file,) = tmp_path.glob("step_profile*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [(row["kernel"], row["kind"]) for row in rows] == [
        ("gemm_tall", "matmul"), ("sample", "sampling"), ("(none)", "gap"),
        *([("(none)", "gap by the clock")] if kind == "serve" else []),
        ("(all)", "matmul"), ("(all)", "sampling"),
        *([] if kind == "serve" else [("(limit)", "floor"), ("(limit)", "sustained")]),
    ]  # fmt: skip
    if kind != "serve":
        assert rows[-1]["share"] == pytest.approx(rows[-1]["us"] / 5, abs=2e-3)  # of rounded times
    assert all((row["step"], row["batch"], row[length[0]]) == (kind, 2, length[1]) for row in rows)
    bars = json.loads(file.read_text())["bars"]
    assert [bar["met"] for bar in bars] == ([False] if kind == "serve" else [])  # idle for most of the time


def test_a_gap_by_the_clock_is_what_kernels_and_copies_leave(monkeypatch):
    """Of a step of 100 us by the clock; a copy that runs beside a kernel is no time of its own."""
    events = [Event("gemm", 10.0 * i, 6.0) for i in range(8)] + [Event("MemcpyDH", 10.0 * i + 4, 4.0) for i in range(8)]
    monkeypatch.setattr(step_profile, "serve_steps", lambda engine, steps: [])
    monkeypatch.setattr(step_profile, "timeline", lambda run, python: events)
    monkeypatch.setattr(step_profile, "by_the_clock", lambda engine, steps: 100.0)
    rows = list(step_profile.served_table(None, 8 - SKIPPED))
    assert [(row["kind"], row["us"], row["share"]) for row in rows if row["kernel"] == "(none)"] == [
        ("gap", pytest.approx(1.6), pytest.approx(1.6 / 9.6, abs=1e-4)), ("gap by the clock", 92.0, 0.92),
    ]  # fmt: skip
