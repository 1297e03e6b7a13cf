"""Claims about the parts of a step: what they measure, at toy size, and what they judge."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.claims import __main__ as command
from experiments.claims import c13, c14, c18, c19, c20, c23, c27, c32, shapes, unfused
from experiments.claims.claim import devices_of
from experiments.claims.unfused import NAMES, Fusions
from jllm.cache import make_cache, parse_kv_cache
from jllm.model import backbone
from jllm.pretrained import Model, load
from tests.test_results_page import GOOD
from tests.tiny import CONFIG, tiny_model


@pytest.fixture
def tiny(monkeypatch) -> None:
    monkeypatch.setattr(shapes, "TOY", shapes.TOY | {"num_layers": 1, "hidden_size": 32, "intermediate_size": 32})


def count(jaxpr, primitive: str) -> int:
    """How often an operation is computed, inner functions included."""
    inner = [value.jaxpr for eqn in jaxpr.eqns for value in eqn.params.values() if hasattr(value, "jaxpr")]
    return sum(eqn.primitive.name == primitive for eqn in jaxpr.eqns) + sum(count(each, primitive) for each in inner)


def test_c13_products_are_those_of_a_step():
    model = tiny_model()
    x = jax.ShapeDtypeStruct((3, CONFIG.hidden_size), jnp.float32)
    made = jax.make_jaxpr(c13.products)(model.params, x, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert made.out_avals[0].shape == (2, CONFIG.vocab_size)
    assert count(made.jaxpr, "dot_general") == 4 * CONFIG.num_layers + 1
    rows = [c13.share_row("decode", 1, 8, [(100.0, share)]) for share in (71.0, 89.0)]
    assert c13.judge(rows).verdict == "yes"
    assert c13.judge([*rows, c13.share_row("prefill", 1, 8, [(100.0, 50.0)])]).verdict == "partly"
    edge = c13.share_row("decode", 1, 8, [(100.0, 90.2), (200.0, 178.0), (50.0, 45.0)])
    assert (edge["step_us"], edge["products_us"], edge["share"], edge["rounds"]) == (116.7, 104.4, 0.8973, 3)
    assert edge["share_ci"] == pytest.approx(0.0160, abs=1e-4)
    assert c13.judge([edge]).answers == ("Open: products take 70% to 90% of a step (decode 1 x 8: 89.7% [88.1, 91.3])",)
    assert c13.judge([edge | {"share_ci": 0.0026}]).verdict == "yes"
    assert c13.judge([edge | {"share": 0.91, "share_ci": 0.0026}]).verdict == "no"
    attention = {"phase": "decode", "kind": "attention", "of_step": 0.25}
    assert "attention kernels take 25% to 25%" in c13.judge([*rows, attention]).measured


def test_c13_maps_steps_by_batch_and_context(tiny):
    rows = list(c13.measure(True))
    assert [(row["phase"], row["batch"], row["tokens"]) for row in rows] == [
        ("decode", 2, 8), ("decode", 2, 16), ("prefill", 1, 16)
    ]  # fmt: skip
    assert all(row["rounds"] == c13.ROUNDS and row["share_ci"] > 0 for row in rows)
    assert all(batch * max(contexts) <= 1 << 16 for batch, contexts in c13.DECODE.items()), "what 80 GB hold"


def test_c14_has_the_share_of_each_round(tiny, monkeypatch):
    monkeypatch.setattr(c14.Bench, "prefill", lambda self, case: [1.0, 2.0, 3.0])
    monkeypatch.setattr(c14.Bench, "decode", lambda self, case: [1 / 16, 2 / 16, 1 / 16])
    (row,) = c14.measure(True)
    assert row["prefill_share"] == pytest.approx((0.5 + 0.5 + 0.75) / 3, abs=1e-4)
    assert row["prefill_share_ci"] == pytest.approx(4.3027 * 0.25 / 3, abs=1e-4)  # Student's t of 2, over sqrt(3)


def test_c14_at_toy_size_through_the_command(tiny, tmp_path, capsys):
    assert command.main(["C14", "--toy", "--results", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])["claims-C14"]
    row, verdict = document["rows"]
    prefill, decode = row["prefill_ms"], 16 * row["decode_ms"]
    assert 0 < row["prefill_share"] < 1
    assert row["rounds"] == c14.ROUNDS
    assert row["tokens_s"] == pytest.approx(32e3 / (prefill + decode), rel=1e-3)
    assert verdict["verdict"] == "toy size: no verdict"
    assert list(tmp_path.glob("claims-C14-*.svg"))
    typical = {"batch": 1, "input": 114, "output": 321, "prefill_share": 0.02}
    assert c14.judge([typical]).verdict == "yes"
    assert c14.judge([typical, typical | {"input": 2048, "prefill_share": 0.5}]).verdict == "partly"
    assert c14.judge([typical | {"prefill_share_ci": 0.09, "rounds": 3}]).verdict == "open"
    assert "2.0% at batch 1 and the workload's mean lengths" in c14.judge([typical]).measured


def layers_of(model: Model, phase: str, sequences: int, tokens: int, fusions: Fusions | None):
    """Layers over pages of random K and V: by the claim's own with some fusions, or by the library's."""
    config = model.config
    x, batch = c18.inputs(config, phase, sequences, tokens, jnp.float32)
    cache = make_cache(config, c18.pages_of(batch), c18.PAGE, parse_kv_cache(None, config, jnp.dtype("float32")))
    leaves, tree = jax.tree.flatten(cache)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    cache = jax.tree.unflatten(tree, [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves)])
    if fusions is None:
        return backbone(model.params, config, batch, cache)
    params = tuple((p, unfused.split(p, config)) for p in model.params.layers)
    if phase == "decode":
        x = model.params.embed[batch.tokens]
    return unfused.layers(params, x, batch, cache, config=config, fusions=fusions)


def test_c18_unfused_layers_compute_the_same():
    model = tiny_model(num_layers=1)

    def close(a, b):
        for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-4)

    def made(phase, sequences, tokens, fusions):
        return jax.jit(lambda: layers_of(model, phase, sequences, tokens, fusions))()

    close(made("decode", 2, 20, Fusions()), made("decode", 2, 20, None))
    close(made("decode", 2, 20, Fusions(*[True] * 4)), made("decode", 2, 20, None))
    close(made("prefill", 1, 24, Fusions()), made("prefill", 1, 24, Fusions(*[True] * 4)))


def test_c18_each_fusion_takes_barriers_away():
    model = tiny_model(num_layers=1)

    def operations(fusions: Fusions) -> tuple[int, int]:
        """Barriers and products."""
        made = jax.make_jaxpr(lambda: layers_of(model, "decode", 2, 20, fusions))().jaxpr
        return count(made, "optimization_barrier"), count(made, "dot_general")

    none = operations(Fusions())
    assert operations(Fusions(*[True] * 4))[0] == 0
    assert operations(Fusions(projections=True)) == (none[0], none[1] - 3)
    for name in set(NAMES) - {"projections"}:
        assert operations(Fusions(**{name: True}))[0] < none[0]


HLO = """HloModule jit_f, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[4]{0} add(%p, %p)
}

%command_buffer (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  %f = f32[4]{0} fusion(%q), kind=kLoop, calls=%fused
  ROOT %g = (f32[4]{0}, s8[16]{0}) custom-call(%f), custom_call_target="__cublas$gemm"
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %c = f32[4]{0} call(%x), to_apply=%command_buffer
  %t = (f32[4]{0}, f32[4]{0}) tuple(%c, %x)
  ROOT %d = f32[4]{0} fusion(%c), kind=kLoop, calls=%fused
}
"""


def test_c18_counts_what_is_launched():
    assert c18.kernels(HLO) == 3
    lowered = jax.jit(lambda x: jnp.tanh(x) @ x).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert c18.kernels(lowered.compile().as_text()) >= 1


def test_c18_is_decided_by_each_fusion():
    def rows(**ms: float) -> list[dict]:
        case = {"phase": "decode", "sequences": 1, "tokens": 8}
        return [case | {"fused": name, "step_ms": value, "kernels": 9.0} for name, value in ms.items()]

    assert c18.judge(rows(none=4.0, norm=3.0, all=2.0)).verdict == "yes"
    found = c18.judge(rows(none=4.0, norm=5.0, all=2.0))
    assert found.verdict == "partly"
    assert found.answers[1:] == ("Yes: all: less time (decode -50.0 %)", "No: norm: less time (decode +25.0 %)")
    assert found.figures == ("decode 1 x 8: 9 to 9 kernels a layer",)
    assert c18.judge(rows(none=4.0, norm=4.04, all=2.0)).answers[2] == "Open: norm: less time (decode +1.0 %)"
    assert c18.judge(rows(none=4.0, all=5.0)).verdict == "no"
    last = c18.judge(rows(none=4.0, norm=4.0, all=2.0) + rows(**{c18.BUT + "norm": 2.5}))
    assert last.answers[1:] == ("Yes: norm: less time (decode as the last -20.0 %); all: less time (decode -50.0 %)",
                                "Open: norm: less time (decode +0.0 %)")  # fmt: skip
    rounds = [row | {"round": i} for i, ms in enumerate((2.0, 2.1, 1.9)) for row in rows(none=4.0 + i, norm=ms + i)]
    assert c18.judge(rounds).answers[1] == "Yes: norm: less time (decode -41.0 % [-60.7, -21.3])"
    wide = [row | {"round": i} for i, ms in enumerate((3.0, 4.1, 3.9)) for row in rows(none=4.0, norm=ms)]
    assert c18.judge(wide).verdict == "open"
    failed = [row for row in rounds if (row["round"], row["fused"]) != (0, "none")]  # the other two rounds are left
    assert c18.judge(failed).answers[1] == "Yes: norm: less time (decode -36.5 % [-55.6, -17.4])"
    apart = [row for row in rounds if (row["fused"] == "norm") == (row["round"] == 2)]
    assert len(c18.judge(apart).answers) == 1, "what shares no round is not compared"


def test_c18_leaves_each_fusion_out(tiny):
    """Every variant gives what the unfused model gives, in fewer kernels than with none."""
    rows = list(c18.measure(True))
    assert not [row for row in rows if "error" in row]
    assert {row["fused"] for row in rows} == set(c18.VARIANTS)
    assert {row["round"] for row in rows} == set(range(c18.ROUNDS))
    for name in NAMES:
        without = c18.VARIANTS[c18.BUT + name]
        assert [each for each in NAMES if not getattr(without, each)] == [name]


def test_c19_parts_add_up():
    row = c19.row_of("prefill", 1, 8, [10.0, 90.0, 10.0, 3.0])
    assert [row[name] for name in c19.PARTS] == pytest.approx([10 / 103, 80 / 103, 10 / 103, 3 / 103], abs=1e-4)
    assert c19.judge([row]).verdict == "yes"
    assert c19.judge([row, c19.row_of("decode", 2, 8, [0.0, 50.0, 10.0, 50.0])]).verdict == "partly"
    assert c19.judge([c19.row_of("decode", 2, 8, [0.0, 90.0, 0.3, 9.7])]).answers == (
        "Yes: compute (decode 2 x 8 90.0%)",
        "No: sample (decode 2 x 8 0.3%); return (decode 2 x 8 9.7%)",
    )
    config = shapes.config_of(True)
    params = jax.eval_shape(lambda: shapes.random_params(config, True))
    tokenizer = load().tokenizer
    host = Model(config, params, tokenizer)
    assert c19.host_us(host, 2, 0, True) > 0
    assert c19.host_us(host, 1, 24, True) > 0
    assert c19.tokenize_us(tokenizer, 24) > 0


def test_c19_reads_what_shows_of_the_host_from_a_trace(tmp_path):
    shares = {"gap": 0.03, "sampling": 0.01, "matmul": 0.5, "rest": 0.46}
    rows = [
        {"batch": 1, "context": 136, "kind": kind, "kernel": "(none)" if kind == "gap" else "(all)", "share": share}
        for kind, share in shares.items()
    ]
    document = GOOD | {"experiment": "step_profile_serve", "rows": [*rows, {"kernel": "sample", "kind": "sampling"}]}
    (tmp_path / "step_profile_serve-20260101-h.json").write_text(json.dumps(document))
    alone = c19.row_of("decode", 1, 256, [0.0, 90.0, 5.0, 5.0])
    document = GOOD | {"experiment": "claims-C19", "rows": [alone, {"verdict": "yes"}]}
    (tmp_path / "claims-C19-20260101-h.json").write_text(json.dumps(document))
    (row,) = c19.overlapped(tmp_path)
    assert (row["compute"], row["sample"], row["return"]) == (0.96, 0.01, 0.03)
    source = {"file": "claims-C19-20260101-h.json", "measured_on": "NVIDIA H200"}
    assert list(c19.recorded(tmp_path)) == [alone | source]
    assert "return in 1 of 2 cases (decode 1 x 136 overlapped 3.0%)" in c19.judge([row, alone]).answers[1]


def test_what_is_computed_from_data_sheets_is_of_no_device():
    """C16 measures this device's link too."""
    assert devices_of({"device": "cpu", "rows": list(c20.measure(True))}) == ["data sheets"]
    rows = [{"source": "data sheet", "device": "A"}, {"source": "measured", "to_host_gb_s": 54.0}]
    assert devices_of({"device": "H", "rows": rows}) == ["data sheets", "H"]


def test_c20_shares_follow_from_weights_and_memory():
    rows = list(c20.measure(True))
    by = {(row["model"], row["kv"], row["device"]): row for row in rows}
    row = by["llama-2-7b", "bf16", "NVIDIA H100 SXM"]
    weights = 6738415616 * 2
    assert row["weights_gib"] == round(weights / 2**30, 1)
    assert row["share"] == pytest.approx(1 - weights / (0.9 * 80e9), abs=1e-3)
    assert row["token_kib"] == 512
    assert by["llama-2-7b", "int8-g8", "NVIDIA H100 SXM"]["sequences"] / row["sequences"] == pytest.approx(
        1.6, rel=0.02
    )
    large = by["176B", "bf16", "NVIDIA H100 SXM"]
    assert (large["devices"], large["share"]) == (8, pytest.approx(1 - 352 / 576, abs=1e-3))
    assert by["176B", "bf16", "NVIDIA L4"]["devices"] is None
    assert c20.judge(rows).verdict == "partly"
    only = [row for row in rows if row["model"] == "llama-2-7b"]
    assert c20.judge(only).verdict == "yes"


def test_c23_wants_almost_all_in_time():
    def rows(completed: float = 0.8, **shares: float) -> list[dict]:
        at = [
            {"load": float(load[1:]) / 10, "rate": float(load[1:]) * 4, "good_share": share, "arrivals_s": 12.0}
            | {"qps": completed * float(load[1:]) * 4, "ttft_ms_p99": 100.0, "itl_ms_p99": 20.0}
            for load, share in shares.items()
        ]
        return [{"load": None, "rate": None, "qps": 40.0, "good_share": 0.1}, *at]

    found = c23.judge(rows(x5=1.0, x7=0.995, x9=0.6))
    assert found.verdict == "yes"
    assert "in a burst of 12 s of up to 28 arrivals a second, no steady state; 22.4 a second were" in found.measured
    assert "where 40 are when all are there at once" in found.measured
    assert c23.judge(rows(x5=1.0, x7=0.995, completed=0.7)).verdict == "partly"  # 19.6 a second came out of the burst
    assert c23.judge(rows(x3=1.0, x5=0.9)).verdict == "partly"
    assert c23.judge(rows(x5=0.9)).verdict == "no"
    assert "; at 36 arrivals 60.0% are" in found.measured
    unlike = c23.judge(rows(x9=1.0, x5=1.0, x7=0.9)).measured  # as loads that were asked for may be
    assert "up to 20 arrivals a second" in unlike
    assert "; at 28 arrivals 90.0% are" in unlike
    steady = [row | {"arrivals_s": 300.0, "source": "simulated"} for row in rows(x5=1.0, x7=1.0)]
    assert (
        "Simulated. Yes: 99% of requests are in time in a steady state of 300 s of up to 28 arr"
        in c23.judge(steady).measured
    )
    assert "no rate failed" in c23.judge(steady).measured
    brief = [row | {"arrivals_s": 299.0} for row in steady]
    assert "in a burst of 299 s of up to 28 arrivals a second, no steady state; " in c23.judge(brief).measured


def test_c27_counts_what_follows_a_requests_end():
    assert c27.unwanted_share([1, 3, 2, 2], 2) == pytest.approx(2 / 10)  # two batches of 2 x 3 and 2 x 2 for 8 tokens
    assert c27.unwanted_share([1, 3, 2], 2) == pytest.approx(2 / 8)  # the last batch has one member
    assert c27.unwanted_share([5, 1, 9], 1) == 0
    rows = list(c27.measure(True))
    shares = [row["unwanted_shuffled"] for row in rows]
    assert shares == sorted(shares)
    assert all(row["unwanted_low"] <= row["unwanted_shuffled"] <= row["unwanted_high"] for row in rows)
    assert c27.judge(rows).verdict == "partly"
    assert c27.judge([row for row in rows if row["batch"] >= 8]).verdict == "yes"
    assert c27.judge([row for row in rows if row["batch"] <= 4]).verdict == "no"


def test_c32_adds_what_measured_steps_took_more():
    def judged(check: float, *ms: tuple[str, float, float, float]):
        rows = [{"part": "check", "measured_ms": ms, "estimated_ms": 1.0} for ms in (0.8, check)]
        for part, size, one, full in ms:
            about = {
                "part": part,
                "device": "NVIDIA X",
                "model": f"{size}B",
                "billions": size,
                "ranks": 1,
                "context": 1024,
            }
            rows.append(about | {"one_ms": one, "full_ms": full, "full_batch": 8})
        return c32.judge(rows)

    assert judged(1.0, ("mesh", 70, 10, 49)).verdict == "yes"
    late = judged(1.1, ("mesh", 70, 10, 63)).answers[2]
    assert late == "No: a full memory on meshes in 1 of 1 cases, at most 69.3 ms (X)"
    between = judged(1.1, ("mesh", 70, 10, 49), ("mesh", 7, 1, 60)).answers[2]
    assert between == "Open: a full memory on meshes in 2 of 2 cases, at most 66 ms (X)", "60 may be 48, and 49 be 54"
    assert judged(1.1, ("mesh", 70, 63, 70)).verdict == "no"
    assert judged(1.1, ("mesh", 70, 50, 60)).verdict == "open"
    assert judged(1.1, ("mesh", 70, 10, 49), ("mesh", 7, 1, 2)).verdict == "partly"
    large = judged(1.0, ("mesh", 70, 10, 49), ("mesh", 405, 60, 90))
    assert large.verdict == "yes", "it is not about more than 100"
    assert large.figures[-1].startswith("405B on 1 X at 1024 keys: 60 ms for one")
    slow = judged(1.0, ("mesh", 70, 10, 49), ("alone", 7, 20, 63))
    assert slow.verdict == "partly"
    assert slow.answers == (
        "Estimated",
        "Yes: one sequence on meshes in 1 of 1 cases, at most 10 ms; one sequence on one device in 1 of 1 cases, at "
        "most 20 ms; a full memory on meshes in 1 of 1 cases, at most 49 ms",
        "No: a full memory on one device in 1 of 1 cases, at most 63 ms (X)",
    )


def test_c32_estimates_what_fits_and_holds_it_against_measured_steps():
    rows = list(c32.measure(True))
    assert not any("error" in row for row in rows), "that is what counts as not measured"
    checks = [row for row in rows if row["part"] == "check"]
    assert {(row["model"], row["layers"], row["ranks"]) for row in checks} == {
        ("llama-2-7b", 32, 1), ("llama-2-7b", 32, 2), ("llama-2-7b", 32, 4), ("llama-2-70b", 80, 2),
        ("llama-2-70b", 80, 4), ("llama-3-8b", 32, 1), ("llama-3-8b", 32, 2),
    }  # fmt: skip
    case = ("device", "ranks", "model", "layers", "scheme", "kv", "backend", "batch", "context")
    assert len({tuple(row[key] for key in case) for row in checks}) == len(checks), "each case counts once"
    assert all(abs(row["off_by"]) < 0.25 for row in checks)
    assert {(row["device"], row["measured_on"]) for row in checks} == {
        ("NVIDIA H100 SXM", "NVIDIA H100 80GB HBM3"), ("NVIDIA H200 SXM", "NVIDIA H200"),
    }, "each by its own device's estimate"  # fmt: skip
    found = {(row["part"], row["device"], row["ranks"], row["context"]): row for row in rows if row["part"] != "check"}
    assert ("alone", "NVIDIA V100 PCIe 16 GB", 1, 1024) not in found, "it runs no kernels of ours"
    assert ("alone", "NVIDIA A2", 1, 8192) not in found, "nor does that fit"
    for row in found.values():
        assert row["one_ms"] <= row["full_ms"]
        assert (row["batch_50ms"] == row["full_batch"]) == (row["full_ms"] < 50)
    one, eight = (found["mesh", "NVIDIA H200 SXM", ranks, 1024] for ranks in (1, 8))
    assert 3 * eight["one_ms"] > one["one_ms"] > 2 * eight["one_ms"], "exchanges take the rest of what eight gain"
    weights, token = 13.48e9, 2 * 32 * 2 * 4096
    assert weights + one["full_batch"] * 1025 * token <= 0.9 * 141e9 < weights + (one["full_batch"] + 8) * 1025 * token


def test_each_draws_its_rows(tmp_path):
    served = {"qps": 2.0, "goodput": 1.0}
    two = [{"policy": name} | served for name in ("ours", "theirs")]
    rows = {
        "C1": two,
        "C3": two,
        "C4": [{"rows": 4, "V": 8, "times": 2.0, "threshold_us": 1.0, "sort_us": 2.0}, *two],
        "C11": [{"prompts": 4, "work_saved": 0.5}, {"prompts": 16, "work_saved": 0.5, "time_saved": 0.4}, *two],
        "C13": [c13.share_row("decode", 1, 8, [(2.0, 1.0)]), {"kind": "attention", "of_step": 0.1}],
        "C14": [{"batch": 1, "input": 8, "output": 8, "prefill_share": 0.1}],
        "C18": [
            {"phase": "decode", "sequences": 1, "tokens": 8, "fused": name, "step_ms": 1.0, "kernels": 3.0}
            for name in ("none", "all")
        ],
        "C19": [c19.row_of("decode", 1, 8, [0.0, 2.0, 1.0, 1.0])],
        "C20": [{"model": "176B", "kv": "bf16", "devices": 8, "share": 0.4}],
        "C23": [{"load": 0.5, "rate": 4.0, "good_share": 1.0, "ttft_ms_p99": 9.0, "itl_ms_p99": 8.0}],
        "C27": [row for row in c27.measure(True) if row["batch"] < 8],
        "C32": [
            {"part": "mesh", "device": "NVIDIA X", "billions": size, "one_ms": 1, "full_ms": 60} for size in (7, 405)
        ],
    }
    for name, found in rows.items():
        path = tmp_path / f"claims-{name}.json"
        document = GOOD | {"experiment": f"claims-{name}", "rows": [*found, {"verdict": "incomplete"}]}
        path.write_text(json.dumps(document))
        assert command.main(["--draw", str(path)]) == 0
        assert path.with_suffix(".svg").read_text().count("<path") > 10
