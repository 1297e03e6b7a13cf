"""The command that tests claims, and what its claims make of their rows."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.claims import __main__ as command
from experiments.claims import c5, c21, c22, decoding, registry, torch_attention
from experiments.claims.claim import Claim, text_table
from jllm.files.hf_config import load_config
from pallas_kernels.decode_attention import mosaic_sm90
from pallas_kernels.decode_attention.cases import Case
from pallas_kernels.decode_attention.config import Config
from tests.kernels.helpers import same_bits
from tests.kernels.interpreter import INTERPRET, make_strict

ROWS = [{"length": 8, "us": 2.0}, {"length": 16, "us": 3.5}]


def pretended(rows) -> Claim:
    """A claim whose rows are given."""
    return Claim(
        id="C5",
        stated="2x",
        measure=lambda toy: iter(rows),
        holds=lambda rows: ("yes", "no"),
        words=lambda rows: (f"{len(rows)} rows", "It is faster."),
    )


@pytest.fixture
def claims(monkeypatch):
    """Claims by id that the command finds in place of the real ones."""
    found = {}
    monkeypatch.setattr(command, "find", lambda name: found[name])
    return found


def test_each_claim_leaves_a_table_and_a_verdict(claims, tmp_path, capsys, monkeypatch):
    claims["C5"] = pretended(ROWS)
    monkeypatch.setattr(command, "on_hopper", lambda: True)
    assert command.main(["C5", "C5", "--results", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr().out
    assert "stated: 2x; measured: 2 rows; direction: yes; size: no\nIt is faster." in out
    document = json.loads(out.splitlines()[-1])["claims-C5"]
    (path,) = tmp_path.glob("claims-C5-*.json")
    assert json.loads(path.read_text()) == document
    answers = {"stated": "2x", "measured": "2 rows", "direction": "yes", "size": "no", "line": "It is faster."}
    assert document["verdict"] == {"claim": "C5", "title": registry.TITLES["C5"]} | answers
    assert document["rows"] == [{"claim": "C5"} | row for row in ROWS]
    assert (document["complete"], document["size"]) == (True, "full")


def test_toy_size_gives_no_verdict(claims, tmp_path, capsys):
    claims["C5"] = pretended(ROWS)
    assert command.main(["C5", "--results", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])["claims-C5"]
    assert (document["size"], document["complete"], "verdict" in document) == ("toy", True, False)
    assert "toy size: no verdict" in out


@pytest.mark.parametrize("rows", [[*ROWS, {"length": 32, "error": "no room"}], [{"error": "no room"}]], ids=len)
def test_what_failed_makes_the_result_incomplete(claims, rows, tmp_path, capsys, monkeypatch):
    claims["C5"] = pretended(rows)
    monkeypatch.setattr(command, "on_hopper", lambda: True)
    assert command.main(["C5", "--results", str(tmp_path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])["claims-C5"]
    assert not document["complete"]
    assert "verdict" not in document


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
    assert (short["complete"], len(short["rows"]), short["verdict"]["direction"]) == (True, 2, "yes")
    assert (long["complete"], len(long["rows"]), "verdict" in long) == (False, 3, False)


def test_what_cannot_be_done_is_said_before_anything_runs(tmp_path, capsys):
    for arguments, message in (
        (
            ["C5", "--results", str(tmp_path)],
            "error: C5 needs a Hopper GPU, whose kernel it is about, and this machine",
        ),
        (["C22", "c35"], "error: unknown claim 'c35'; near: C"),
        (["C23", "c27", "--seconds", "60"], "error: --seconds has no meaning for C27, at whose loads"),
        (["C23", "c28", "--loads", "1"], "error: --loads has no meaning for C28, whose loads are not raised"),
    ):
        assert command.main(arguments) == 2
        assert capsys.readouterr().err.startswith(message)
    for arguments, message in (
        ([], "the following arguments are required: CLAIM"),
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


def test_flash_attention_answers_every_case_even_without_a_gpu():
    cases = [{"R": 1, "length": 16, "H": 2, "K": 1, "D": 64, "sets": 1}] * 2
    assert ["error" in found for found in torch_attention.flash_attention(cases)] == [True, True]
