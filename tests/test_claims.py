"""The command that tests claims, and what its claims make of their rows."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.claims import __main__ as command
from experiments.claims import c5, c21, c22, decoding, registry, torch_attention
from experiments.claims.claim import Claim, Verdict, text_table
from experiments.report import judged
from jllm.config import load_config
from pallas_kernels.decode_attention import mosaic_sm90
from pallas_kernels.decode_attention.cases import Case
from pallas_kernels.decode_attention.config import Config
from tests.kernels.helpers import same_bits
from tests.kernels.interpreter import INTERPRET, make_strict
from tests.test_results_page import GOOD

ROWS = [{"length": 8, "us": 2.0}, {"length": 16, "us": 3.5}]


def pretended(rows) -> Claim:
    """A claim whose rows are given."""
    return Claim(
        id="C5",
        stated="2x",
        rule="2 or more",
        measure=lambda toy: iter(rows),
        judge=lambda rows: Verdict(
            "yes", (f"{len(rows)} rows",), bars=({"name": "n", "value": 1, "unit": "1", "bar": 1, "met": True},)
        ),
        draw=lambda figure, rows: figure.subplots().plot([row["us"] for row in rows]),
    )


@pytest.fixture
def claims(monkeypatch):
    """Claims by id that the command finds in place of the real ones."""
    found = {}
    for module in (command, judged):
        monkeypatch.setattr(module, "find", lambda name: found[name])
    return found


def test_each_claim_leaves_table_verdict_and_picture(claims, tmp_path, capsys, monkeypatch):
    claims["C5"] = pretended(ROWS)
    monkeypatch.setattr(command, "on_hopper", lambda: True)
    assert command.main(["C5", "C5", "--results", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr().out
    assert "stated: 2x; measured: 2 rows; verdict: yes" in out
    document = json.loads(out.splitlines()[-1])["claims-C5"]
    (path,) = tmp_path.glob("claims-C5-*.json")
    assert json.loads(path.read_text()) == document
    verdict = {"claim": "C5", "stated": "2x", "measured": "2 rows", "verdict": "yes"}
    assert document["rows"] == [*({"claim": "C5"} | row for row in ROWS), verdict]
    assert (document["complete"], document["size"], len(document["bars"])) == (True, "full", 1)
    picture = path.with_suffix(".svg")
    drawn = picture.read_bytes()
    picture.unlink()
    assert command.main(["--draw", str(path)]) == 0
    assert picture.read_bytes() == drawn


def test_toy_size_gives_no_verdict(claims, tmp_path, capsys):
    claims["C5"] = pretended(ROWS)
    assert command.main(["C5", "--results", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])["claims-C5"]
    assert (document["size"], document["bars"]) == ("toy", [])
    assert document["rows"][-1]["verdict"] == "toy size: no verdict"


@pytest.mark.parametrize("rows", [[*ROWS, {"length": 32, "error": "no room"}], [{"error": "no room"}]], ids=len)
def test_what_failed_makes_the_result_incomplete(claims, rows, tmp_path, capsys, monkeypatch):
    claims["C5"] = pretended(rows)
    monkeypatch.setattr(command, "on_hopper", lambda: True)
    assert command.main(["C5", "--results", str(tmp_path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])["claims-C5"]
    assert not document["complete"]
    assert document["rows"][-1]["verdict"] == "incomplete"


@pytest.mark.parametrize("order", [("C5", "C21"), ("C21", "C5")])
def test_a_claim_is_concluded_when_its_own_rows_have_ended(claims, order, tmp_path, monkeypatch):
    """Of two side by side the longer one is cut off."""

    def cut_off(toy):
        yield from [*ROWS, ROWS[0]]
        raise KeyboardInterrupt

    claims["C5"] = replace(pretended(ROWS), alternates=True)
    claims["C21"] = replace(claims["C5"], id="C21", measure=cut_off)
    monkeypatch.setattr(command, "on_hopper", lambda: True)
    assert command.main([*order, "--results", str(tmp_path)]) == 130
    short, long = (json.loads(next(tmp_path.glob(f"claims-{name}-*.json")).read_text()) for name in ("C5", "C21"))
    assert (short["complete"], [row.get("verdict") for row in short["rows"]]) == (True, [None, None, "yes"])
    assert (long["complete"], len(long["rows"])) == (False, 3)


def test_what_cannot_be_done_is_said_before_anything_runs(tmp_path, capsys):
    for arguments, message in (
        (
            ["C5", "--results", str(tmp_path)],
            "error: C5 needs a Hopper GPU, whose kernel it is about, and this machine",
        ),
        (["C22", "c35"], "error: unknown claim 'c35'; near: C"),
        (["C23", "c27", "--seconds", "60"], "error: --seconds has no meaning for C27, at whose loads"),
        (["C23", "c28", "--loads", "1"], "error: --loads has no meaning for C28, whose loads are not raised"),
        (["--draw", str(tmp_path / "none.json")], "error: "),
    ):
        assert command.main(arguments) == 2
        assert capsys.readouterr().err.startswith(message)
    (tmp_path / "other.json").write_text(json.dumps(GOOD))
    assert command.main(["--draw", str(tmp_path / "other.json")]) == 2
    assert "other.json: a result of decode_attention, not of claims-" in capsys.readouterr().err
    for arguments, message in (
        ([], "name claims to test, or results to --draw"),
        (["C5", "--draw", "x.json"], "name claims to test, or results to --draw"),
        (["--draw", "x.json", "--seconds", "60"], "--draw measures nothing, so it goes without --seconds"),
        (["--draw", "x.json", "--toy"], "--draw measures nothing, so it goes without --toy"),
        (["C23", "--toy", "--seconds", "60"], "--seconds is for claims at full size"),
        (["C23", "--toy", "--loads", "1"], "--loads is for claims at full size"),
    ):
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = capsys.readouterr().out
    assert all(title in shown for title in registry.TITLES.values())
    assert not list(tmp_path.glob("claims-*"))


def test_every_claim_is_found_under_its_id():
    for name in registry.TITLES:
        assert registry.find(name.lower()).id == name


def test_tables_have_a_block_for_each_set_of_keys():
    table = text_table([{"claim": "C1", "a": 1, "b": 2.0}, {"claim": "C1", "a": 10, "b": 0.123456789}, {"c": "x"}])
    assert table.splitlines() == [" a         b", " 1         2", "10  0.123457", "", "c", "x"]


def test_c5_compares_times_with_flash_attention():
    def rows(*times):
        cells = ((1, 1024), (64, 1024), (128, 2048))
        of = {"H": 32, "K": 8, "us": 100.0}
        return [
            of | {"R": r, "length": n, "flash_us": 100 * t, "over_flash": round(t, 2)}
            for (r, n), t in zip(cells, times)
        ]

    yes, partly, no = (c5.judge(rows(*times)) for times in ((1.2, 2.1, 2.05), (1.2, 1.55, 1.6), (1.2, 1.0, 0.9)))
    assert (yes.verdict, partly.verdict, no.verdict) == ("yes", "partly", "no")
    faster = "faster in all 2 cases (64 x 1024 32/8: 1.550, 128 x 2048 32/8: 1.600)"
    assert partly.answers[1:] == (f"Yes: {faster}", "No: 2 times as fast in every case")
    assert partly.figures == ("1.55 to 1.60 times as fast from 65,536 keys on; 1.20 to 1.20 times as fast below",)
    for near in (1.051, 1.049):  # another process could say otherwise
        at = c5.judge(rows(1.2, 1.3, near)).answers[1:]
        assert at[0] == "Yes: faster in 1 of 2 cases (64 x 1024 32/8: 1.300)"
        assert at[2] == f"Open: faster in 1 of 2 cases (128 x 2048 32/8: {near})"
    assert [(bar["bar"], bar["met"]) for bar in partly.bars] == [(1.5, True), (1.6, True)]


def test_c21_asks_for_hidden_work():
    def rows(*once_and_ten):
        at = {"R": 1, "H": 2, "K": 1}
        return [
            at | {"length": i, "dequantized": times, "over_bytes": ratio}
            for i, ratios in enumerate(once_and_ten)
            for times, ratio in ((0, 1.0), *zip((1, 10), ratios))
        ]

    yes, partly, no = (
        c21.judge(rows((1.0, first), (1.1, second))) for first, second in ((1.01, 1.15), (1.01, 1.3), (1.3, 2.5))
    )
    assert (yes.verdict, partly.verdict, no.verdict) == ("yes", "partly", "no")
    wide = [row | {"over_bytes_ci": 0.02, "rounds": 5} for row in rows((1.0, 1.14))]
    assert c21.judge(wide).answers == (
        "Open: hidden at 10x (1 x 0 2/1: 1.00 [0.98, 1.02] once and 1.14 [1.12, 1.16] at 10x)",
    )
    assert no.figures == ("time over that of the bytes, dequantized 1 times: 1.00 to 1.10, 10 times: 1.30 to 2.50",)
    assert partly.answers[1] == "No: hidden at 10x in 1 of 2 cases (1 x 1 2/1: 1.10 once and 1.30 at 10x)"


@pytest.fixture
def timed(monkeypatch):
    """Every kernel is pretended to take 100 us, FlashAttention-2 150; what is timed is only traced."""

    def compiled(runs, free=lambda: None):
        free()
        for run in (runs[0], runs[-1]):
            made = jax.eval_shape(run.make, jax.random.key(0))
            if run.attend.__qualname__.startswith("paged"):  # cuDNN cannot be traced without a GPU
                assert jax.eval_shape(run.attend, *made).shape == made[0].shape
        return [decoding.Compiled(None, None, run.layers) for run in runs]

    monkeypatch.setattr(decoding.Compiled, "timed", lambda self: (100.0, jnp.zeros(3)))
    monkeypatch.setattr(c5, "compiled", compiled)
    monkeypatch.setattr(c21, "compiled", compiled)
    monkeypatch.setattr(c5, "flash_attention", lambda cases: [{"us": 150.0}] * (len(cases) - 1) + [{"error": "no"}])


def test_c5_measures_every_cell(timed):
    *rows, failed = c5.measure(False)
    assert len(rows) == 8
    assert failed["error"] == "FlashAttention-2: no"
    assert {(row["us"], row["flash_us"], row["over_flash"], row["over_cudnn"]) for row in rows} == {(100, 150, 1.5, 1)}
    assert (rows[0]["R"], rows[0]["length"], rows[0]["K"]) == (128, 2048, 32)
    assert rows[0]["gb_s"] == round(2 * 128 * 2048 * 32 * 128 * 2 / 100e3)


def test_c21_measures_against_the_rate_of_plain_pages(timed, monkeypatch):
    rows = list(c21.measure(False))
    assert [row["dequantized"] for row in rows[:5]] == [0, *c21.REPEATS]
    assert {row["over_bytes"] for row in rows if row["dequantized"]} == {1.6}  # 512 bytes over 256 and 64 of scales
    assert {(row["rounds"], row["over_bytes_ci"]) for row in rows if row["dequantized"]} == {(c21.ROUNDS, 0.0)}
    outs = iter(range(1000))
    monkeypatch.setattr(decoding.Compiled, "timed", lambda self: (100.0, jnp.full(3, next(outs) // 5)))
    assert not any("error" in row for row in c21.measure(False))
    slower = iter(range(1000))
    monkeypatch.setattr(decoding.Compiled, "timed", lambda self: (100.0 + next(slower) // 5 % 5, jnp.zeros(3)))
    assert {row["over_bytes_ci"] for row in c21.measure(False) if row["dequantized"]} == {0.0}, "ratios of a round"
    monkeypatch.setattr(decoding.Compiled, "timed", lambda self: (100.0, jnp.full(3, next(outs))))
    assert sum("not the same" in row.get("error", "") for row in c21.measure(False)) == 12


def test_dequantizing_again_changes_no_bit(monkeypatch):
    make_strict(monkeypatch)
    case = Case(
        lengths=(70,), heads=(1, 1), head_dim=64, page_size=64, k_format="int8-g8", v_format="int4-g32",
        dtype="bfloat16",
    )  # fmt: skip
    arguments = case.inputs()
    outs = [
        mosaic_sm90.decode_attention(
            *arguments, case.scale, None, interpret=INTERPRET,
            config=Config(computing=1, split=128, sms=1, stages=2, dequantize=times),
        )
        for times in (1, 3)
    ]  # fmt: skip
    assert np.asarray(outs[0]).any()
    assert same_bits(*outs)


def test_c22_measures_a_token_with_and_without_a_cache(monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    config = c22.replace(load_config(c22.CONFIG), **sizes, vocab_size=64)
    params = c22.init_params(c22.replace(config, num_layers=3), jax.random.key(0), jnp.bfloat16)
    jobs = [(48, cached, depth) for cached in (True, False) for depth in c22.DEPTHS]
    steps = {job: c22.Step(params, config, *job) for job in jobs}
    times = iter((10.0, 30.0, 100.0, 400.0))  # of one and of three layers, with the cache and without
    monkeypatch.setattr(c22, "microseconds", lambda call: (call(), next(times))[1])
    row = c22.cache_row(config, 48, steps)
    assert (row["cached_ms"], row["recomputed_ms"]) == (0.32, 4.75)  # 10 + 31 x 10, 100 + 31 x 150
    assert row["times"] == 14.84
    assert row["cached_mib"] >= round(2 * 32 * 48 * 32 * 2 / c22.MIB, 1)  # K and V, layers, tokens, 2 x 16, bytes
    times = iter((10.0, 9.0))
    assert "three layers took no longer" in c22.cache_row(config, 48, steps)["error"]


def test_c22_compares_attention_that_agrees(monkeypatch):
    row = c22.Contest(48, 2, 64).row()
    assert row["times"] == round(row["naive_us"] / row["flash_us"], 2)
    monkeypatch.setattr(c22, "naive", lambda q, k, v, scale: jnp.flip(q, 0) * jnp.asarray(scale, q.dtype))
    assert "of their norm apart" in c22.Contest(48, 2, 64).row()["error"]


def test_c22_is_decided_by_every_length():
    cache = {"part": "cache", "tokens": 8, "cached_ms": 1.0, "recomputed_ms": 3.0, "cached_mib": 1, "recomputed_mib": 2}
    flash = {"part": "attention", "tokens": 8, "flash_us": 1.0, "naive_us": 2.0, "flash_mib": 1, "naive_mib": 5}
    for times, verdict in (((3.0, 2.0), "yes"), ((3.0, 0.5), "partly"), ((0.5, 0.5), "no")):
        found = c22.judge([row | {"times": t} for row, t in zip((cache, flash), times)])
        assert found.verdict == verdict
    for times, rising in ((3.0, "Yes"), (1.5, "No"), (1.95, "Open"), (2.06, "Open")):
        found = c22.judge([cache | {"times": 2.0}, cache | {"tokens": 16, "times": times}])
        said = f"the cache gains more by length (2, {times:g} times)"
        assert [text.partition(": ")[0] for text in found.answers if said in text] == [rising]


def test_each_claim_draws_its_rows(tmp_path):
    shape = {"R": 64, "length": 1024, "H": 32, "K": 32}
    examples = {
        "C5": [shape | {"over_flash": 1.5}],
        "C21": [shape | {"dequantized": times, "over_bytes": 1.0} for times in c21.REPEATS],
        "C22": [
            {"part": part, "tokens": 8} | {f"{name}_{unit}": 1.0 for name in names for unit in (time, "mib")}
            for part, names, time in (
                ("cache", ("cached", "recomputed"), "ms"), ("attention", ("flash", "naive"), "us"),
            )
        ],
    }  # fmt: skip
    for name, rows in examples.items():
        path = tmp_path / f"claims-{name}.json"
        rows = [*rows, {"verdict": "incomplete"}]
        path.write_text(json.dumps(GOOD | {"experiment": f"claims-{name}", "rows": rows}))
        assert command.main(["--draw", str(path)]) == 0
        assert path.with_suffix(".svg").read_text().count("<path") > 10


def test_flash_attention_answers_every_case_even_without_a_gpu():
    cases = [{"R": 1, "length": 16, "H": 2, "K": 1, "D": 64, "sets": 1}] * 2
    assert ["error" in found for found in torch_attention.flash_attention(cases)] == [True, True]
