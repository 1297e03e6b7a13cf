"""Costs of steps against figures worked out by hand; data sheets; the claim about the host's link."""

import json
from dataclasses import replace

import pytest

from experiments.ceilings import best
from experiments.claims import c16
from experiments.steps.cost_model import (
    CostModel,
    Shares,
    calibrated,
    fit,
    format_factor,
    make_cost_model,
    model_shapes,
    recorded_steps,
)
from experiments.steps.devices import SHEETS, DeviceSheet, ceilings_of, device_sheet, device_sheets, read_sheet
from experiments.steps.floors import Floor, Matrix, Work, schedule, step_work, token_bytes, workload_seconds
from jllm.engine.scheduler import Limits
from jllm.errors import ConfigError, InputFileError

# One layer's product of 1000 x 1000 in 16 bits twice, a head of 10 x 1000; 1 GB/s, 1 GFLOP/s: all worked out by hand.
FLOOR = Floor(((Matrix(2_000_000, 1000, 1000, 1e9), 2),), Matrix(20_000, 10, 1000, 1e9), 4000, 1e9, 1e9)


def test_a_step_costs_what_its_parts_do():
    decode = Work(decodes=1, tokens=0, rows=1, keys=100)
    # two products: 2e6 bytes or operations; head: 20,000 bytes or operations
    products = 2 * 2e-3 + 2e-5
    assert FLOOR.parts(decode, 50.0) == pytest.approx((products, 5e-6))
    assert CostModel(FLOOR, 50.0).seconds(decode) == pytest.approx(products + 5e-6)
    shares = Shares(fixed=1e-3, products=2.0, attention=3.0)
    assert CostModel(FLOOR, 50.0, shares).seconds(decode) == pytest.approx(1e-3 + 2 * products + 1.5e-5)
    three = CostModel(replace(FLOOR, layers=3), 50.0, shares)
    assert three.seconds(decode) == pytest.approx(3e-3 + 2 * products + 1.5e-5), "its fixed time is of each layer"
    # 10 rows computed though one decodes: 2e7 operations each now take longer than the bytes; the head sees one row
    assert CostModel(FLOOR, 50.0).seconds(decode, 10) == pytest.approx(2 * 2e-2 + 2e-5 + 5e-6)
    # a prompt of 4: attention's 10 pairs x 4000 operations take longer than 4 keys of 50 bytes
    prompt = Work(decodes=0, tokens=4, rows=1, keys=0, prompt_keys=4, pairs=10.0)
    assert CostModel(FLOOR, 50.0).seconds(prompt) == pytest.approx(2 * 8e-3 + 2e-5 + 4e-5)


def test_a_mixed_steps_two_kernels_of_attention_do_not_overlap():
    """One decoding row of 1,000 keys beside a prompt of 4: each product runs once on all five rows, with the larger of
    bytes and operations; decoding reads 50,000 bytes, and then the prompt computes 40,000 operations, which hides its
    own 200 bytes alone."""
    mixed = step_work(1, 1000, [(0, 4, True)])
    assert mixed == Work(decodes=1, tokens=4, rows=2, keys=1000, prompt_keys=4, pairs=10.0)
    assert FLOOR.parts(mixed, 50.0) == pytest.approx((2 * 5 * 2e-3 + 2 * 2e-5, 5e-5 + 4e-5))
    apart = [step_work(1, 1000), step_work(0, 0, [(0, 4, True)])]
    attention = [FLOOR.parts(work, 50.0)[1] for work in (mixed, *apart)]
    assert attention[0] == pytest.approx(sum(attention[1:]))


def test_a_workloads_floor_by_hand():
    """A prompt of 12 in chunks of 8 and 4, then two decode steps. The second chunk reads the 8 keys of the first one
    too, and the head runs on the prompt's last token alone. At 50,000 bytes a token reading keys takes longer than
    computing with them."""
    limits = Limits(1, 8, 8, 1, 4, 20, 8)
    steps = [Work(0, 8, 0, 0, 8, 36.0), Work(0, 4, 1, 0, 12, 42.0), Work(1, 0, 1, 13), Work(1, 0, 1, 14)]
    assert list(schedule([(12, 3)], limits)) == steps
    products = 2 * (8 + 4 + 1 + 1) * 2e-3
    head = 4 * 2e-5  # the first chunk's, too: the head's bytes are read
    keys = (8 + 12 + 13 + 14) * 50_000e-9
    assert workload_seconds([(12, 3)], limits, [FLOOR], 50_000)[0] == pytest.approx(products + head + keys, rel=1e-9)


@pytest.mark.parametrize("truth", [(2e-3, 1.5, 2.0), (0.0, 1.0, 4.0)], ids=str)
def test_a_fit_finds_the_shares_that_made_the_steps(truth):
    works = [Work(n, 0, n, keys) for n, keys in ((1, 300), (16, 200), (64, 40_000), (256, 30_000))]
    made = CostModel(FLOOR, 5e4, Shares(*truth))
    shares = fit([(work, made.seconds(work)) for work in works], FLOOR, 5e4, "made up")
    assert (shares.fixed, shares.products, shares.attention) == pytest.approx(truth, rel=1e-6, abs=1e-9)
    assert shares.error == pytest.approx(0, abs=1e-9)
    off = fit([(work, made.seconds(work) * (1.1 if i == 0 else 1)) for i, work in enumerate(works)], FLOOR, 5e4, "off")
    assert 1e-3 < off.error < 0.1
    with pytest.raises(InputFileError, match="made up: 2 steps are too few"):
        fit([(work, 1.0) for work in works[:2]], FLOOR, 5e4, "made up")


def test_what_few_rows_cannot_tell_apart_counts_as_fixed():
    """Up to 100 rows a product that computes 100 times as fast takes what its bytes do."""
    floor = Floor(((Matrix(2_000_000, 1000, 1000, 1e11), 2),), Matrix(20_000, 10, 1000, 1e11), 4000, 1e9, 1e9)
    works = [Work(n, 0, n, keys) for n, keys in ((1, 300), (16, 200), (64, 40_000))]
    made = CostModel(floor, 5e4, Shares(1e-3, 1.5, 2.0))
    shares = fit([(work, made.seconds(work)) for work in works], floor, 5e4, "few rows")
    read = 2 * 2e-3 + 2e-5
    assert (shares.fixed, shares.products, shares.attention) == pytest.approx((1e-3 + 0.5 * read, 1.0, 2.0))


def test_no_share_is_below_its_floor():
    works = [Work(n, 0, n, keys) for n, keys in ((1, 300), (16, 200), (64, 40_000), (256, 30_000))]
    made = CostModel(FLOOR, 5e4, Shares(0.0, 0.5, 2.0))
    assert fit([(work, made.seconds(work)) for work in works], FLOOR, 5e4, "fast").products >= 1.0


def test_measured_steps_are_read_from_results():
    rows = [
        {"model": "m", "batch": n, "backend": backend, "kv": "bfloat16", "context": 256, "decode_ms": ms}
        for n, backend, ms in ((1, "xla", 9.0), (1, "mosaic", 4.0), (8, "mosaic", 5.0))
    ]
    assert recorded_steps({"rows": rows}) == [(Work(1, 0, 1, 257), 0.004), (Work(8, 0, 8, 2056), 0.005)]
    cell = {"kernel": "decode_attention", "R": 64, "length": 1024, "H": 32, "K": 32}
    bench = {"rows": [cell | {"kv": kv, "gb_s": rate} for kv, rate in (("bf16", 4000), ("fp8", 2000), ("fp8", 3200))]}
    assert format_factor(bench, "fp8") == 1.25
    assert format_factor(bench, None) == format_factor(bench, "bf16") == 1.0
    assert format_factor(bench, "k=bf16,v=fp8") == 1.25
    assert format_factor(bench, "int8-g8") is None


def test_the_committed_results_give_a_cost_model():
    plain, eight = calibrated(None), calibrated("int8-g8")
    assert plain.error is not None
    assert plain.error < 0.10
    assert plain.source.startswith("decode_step-")
    assert eight.attention > plain.attention
    model = model_shapes("llama-2-7b")
    work = Work(64, 0, 64, 64 * 1024)
    bf16 = make_cost_model(model, None, plain).seconds(work)
    assert bf16 > make_cost_model(model, None, Shares()).seconds(work)
    # 13.2 GB of weights and 64 x 1024 tokens of 512 KiB at 4.55 TB/s
    assert make_cost_model(model, None, Shares()).seconds(work) == pytest.approx(10.46e-3, rel=0.002)


def test_no_results_no_calibration(tmp_path):
    assert calibrated(None, tmp_path) == Shares()
    (tmp_path / "decode_step-20260101-h200.json").write_text(json.dumps({"rows": [{"model": "a"}, {"model": "b"}]}))
    with pytest.raises(InputFileError, match="of one model, not of a, b"):
        calibrated(None, tmp_path)


def test_every_data_sheet_is_whole():
    sheets = device_sheets()
    assert len(sheets) >= 12
    for sheet in sheets.values():
        assert sheet.source
        assert 9 < sheet.bandwidth_gb_s / sheet.host_gb_s < 200 or sheet.host_link == "NVLink-C2C"
        assert 15e12 < sheet.peak16 < 2e15
        assert sheet.price is None or 0.1 < sheet.price.usd_hour < 10
    assert sheets["v100-sxm-32gb"].peak16 == 125e12
    assert (sheets["h200-sxm"].bandwidth, sheets["h200-sxm"].memory) == (4.8e12, 141e9)


def test_ceilings_are_those_measured_or_else_the_data_sheets():
    h200, a10 = ceilings_of("NVIDIA H200"), ceilings_of("NVIDIA A10")
    assert (h200.bandwidth, h200.attention) == (4.545e12, 642.3e12)
    assert h200.peaks == {None: 815.2e12, "int8": 1637e12, "fp8": 1500e12}
    assert "measured on NVIDIA H200" in h200.source
    assert (a10.bandwidth, a10.peaks, a10.attention) == (600e9, {None: 125e12, "int8": 250e12}, 125e12)
    assert "the data sheet of NVIDIA A10, as nothing was measured" in a10.source
    unknown, asked = ceilings_of("cpu"), ceilings_of("NVIDIA H200", 1e12)
    assert (unknown.bandwidth, asked.bandwidth, asked.peaks) == (4.545e12, 1e12, h200.peaks)
    assert "no data sheet is of 'cpu'" in unknown.source
    assert "but for the bandwidth that was asked for" in asked.source
    held = ceilings_of("NVIDIA H100 80GB HBM3")
    assert held.sustained.peaks == {**held.peaks, None: 705e12}, "what is not listed has its best rate"
    assert held.document["sustained"]["bandwidth"] == held.sustained.bandwidth < held.bandwidth
    assert (a10.sustained, ceilings_of("NVIDIA H100 80GB HBM3", 1e12).sustained) == (None, None)
    kinds = [sheet.device_kind for sheet in device_sheets().values() if sheet.device_kind]
    assert len(set(kinds)) == len(kinds) > 10


def test_what_was_measured_is_what_the_file_says():
    """Ceilings of a device are the best rates of the file that its sheet names."""
    for sheet in device_sheets().values():
        if sheet.measured and sheet.measured.source.startswith("experiments/results/"):
            document = json.loads((SHEETS.parents[1] / sheet.measured.source).read_text())
            assert document["device"] == sheet.device_kind
            found, measured = best(document["rows"]), sheet.measured
            assert measured.bandwidth_gb_s == pytest.approx(found["bandwidth"] / 1e9, rel=1e-3)
            assert measured.attention_tflops == pytest.approx(found["attention"] / 1e12, rel=1e-3)
            assert measured.dense_tflops == pytest.approx({k: found[k] / 1e12 for k in measured.dense_tflops}, rel=1e-3)


def test_a_wrong_sheet_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"called 'h20'; near: .*h200-sxm"):
        device_sheet("h20")
    good = json.loads((SHEETS / "l4.json").read_text())
    prices = [{"price": good["price"] | change} for change in ({"usd_hour": 0}, {"usd_hour": "1"}, {"read": "May"})]
    part = {"bandwidth_gb_s": 1, "dense_tflops": {"int8": 1}, "attention_tflops": 1, "source": "x"}
    measured = [{"measured": each} for each in ({}, part, part | {"dense_tflops": {"bf16": 0}})]
    sizes = [{"memory_gb": 0}, {"dense_tflops": {"fp3": 1}}, {"dense_tflops": {}}]
    for change in (*sizes, *measured, {"price": 1}, *prices):
        path = tmp_path / "x.json"
        path.write_text(json.dumps(good | change))
        with pytest.raises(ConfigError, match="x.json: not a device's data sheet"):
            read_sheet(path)


def test_c16_by_hand():
    model = model_shapes("llama-2-7b")
    sheet = DeviceSheet("X", 100, 1000, {"bf16": 400}, "PCIe", 10, "made up")
    row = c16.device_row(model, "llama-2-7b", None, sheet, 1000)
    each = 1000 * token_bytes(model, None)
    assert each == 524_288_000
    weights = 13_476_839_424  # of the model's 6.738 billion, the embedding's 131 million not read in a step
    assert row["batch"] == int((90e9 - weights) // each) == 145
    assert row["transfer_ms"] == pytest.approx(52.43, rel=1e-3)
    step = (weights - 262_144_000 + 145 * each) / 1e12
    assert row["step_ms"] == pytest.approx(1e3 * step, rel=0.001)
    assert row["stream_share"] == pytest.approx(row["step_ms"] * 1e-3 * 1e10 / (145 * each), rel=1e-3)
    assert row["break_even_context"] == pytest.approx(1000 * row["step_ms"] / row["transfer_ms"], rel=1e-3)
    # a prefill of 1000 tokens is 2 x 6.476e9 operations a token in the layers, and a little for head and attention
    assert row["recompute_ms"] == pytest.approx(1e3 * 2 * 1000 * 6.476e9 / 4e14, rel=0.05)
    assert row["swap_over_recompute"] == pytest.approx(2 * row["transfer_ms"] / row["recompute_ms"], rel=1e-3)
    small = DeviceSheet("Y", 14, 1000, {"bf16": 100}, "PCIe", 10, "made up")
    assert c16.device_row(model, "llama-2-7b", None, small, 1000)["batch"] == 0


def test_copies_are_timed_both_ways():
    row = c16.copies(1 << 20)
    assert row["source"] == "measured"
    assert row["to_host_gb_s"] > 0
    assert row["to_device_gb_s"] > 0
