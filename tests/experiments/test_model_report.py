"""The page about how a model may be quantized."""

import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from experiments import model_report
from experiments.model_report import decode_ms, plain_shapes, runnable
from experiments.report.model_page import Choice, closest, front, smallest
from experiments.steps.devices import device_sheet
from jllm.quant.schemes import PLAIN
from tests.tiny import CONFIG

pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def choice(kl: float, size: int) -> Choice:
    return Choice("s", "k", kl, size, {}, 0, 0.0, None)


CHOICES = st.lists(st.builds(choice, st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=9)


@given(CHOICES, st.floats(0, 1), st.integers(0, 10))
def test_recommendations_are_the_best_there_are(found, kl, limit):
    best = front(found)
    for one in found:
        beaten = any(o.bytes <= one.bytes and o.kl <= one.kl and (o.bytes, o.kl) != (one.bytes, one.kl) for o in found)
        assert beaten == all((o.bytes, o.kl) != (one.bytes, one.kl) for o in best)
    for pick, fits, key in (
        (smallest(found, kl), [c for c in found if c.kl <= kl], lambda c: c.bytes),
        (closest(found, limit), [c for c in found if c.bytes <= limit], lambda c: c.kl),
    ):
        assert (pick is None) == (not fits)
        if pick is not None:
            assert key(pick) == min(map(key, fits))
            assert any((o.bytes, o.kl) == (pick.bytes, pick.kl) for o in best)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A page of the bundled model."""
    folder = tmp_path_factory.mktemp("report")
    command = ["--tokens", "200", "--schemes", "nf4", "--kv", "int8-g8", "--results", str(folder)]
    command += ["--device", "rtx-4090", "--sequences", "2", "--context", "64"]
    assert model_report.main(command) == 0
    (page,), (file,) = folder.glob("*.html"), folder.glob("*.json")
    return SimpleNamespace(text=page.read_text(), document=json.loads(file.read_text()), command=command, page=page)


def cells(text: str) -> list[list[str]]:
    return [re.findall(r"<td>(.*?)</td>", line) for line in re.findall(r"<tr.*?</tr>", text)]


def test_each_row_of_the_result_is_in_the_table_with_its_figures(made):
    rows = {(row["scheme"], row["kv"]): row for row in made.document["rows"]}
    assert set(rows) == {(s, k) for s in (PLAIN, "nf4") for k in ("model", "int8-g8")}
    found = {tuple(line[:2]): line for line in cells(made.text) if len(line) == 9}
    for key, row in rows.items():
        assert found[key][5].startswith(f"{row['kl']:.2g}")
        assert found[key][6] == f"{row['added']:.2%}"
        assert found[key][7] == f"{row['top1']:.1%}"
    assert found[PLAIN, "model"][2] == "13.9 MB"
    assert float(found["nf4", "model"][2].split()[0]) < 6


def test_the_page_stands_alone_and_says_what_is_estimated(made):
    loads = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", made.text)
    assert all(target.startswith("#") for target in loads)
    assert "<script" not in made.text
    assert "Milliseconds: estimated for NVIDIA GeForce RTX 4090" in made.text
    assert "ms a step (estimated)" in made.text
    assert made.text.count("<svg") in (0, 2)  # none without matplotlib, which the page says then
    assert ("matplotlib is missing" in made.text) == ("<svg" not in made.text)


def test_bad_input(made, tmp_path, capsys):
    for arguments, message in (
        (["--device", "rtx-4091"], "no data sheet of a device called 'rtx-4091'; near: rtx-4090"),
        (["--model", str(tmp_path / "none")], str(tmp_path / "none")),
        (["--schemes", "w3"], "w3"),
        (["--kv", "int3"], "int3"),
        (["--out", str(tmp_path / "no" / "page.html")], "there is no folder"),
    ):
        assert model_report.main(["--results", str(tmp_path), *arguments]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.startswith("error: ")
        assert said.count("\n") == 1


def test_what_a_model_cannot_have_is_left_out_with_the_reason():
    odd = plain_shapes(CONFIG)  # D = 16
    good, bad = runnable(odd, {"int8-g8": "int8-g8", "int4-g32": "int4-g32"}, "kv")
    assert list(good) == ["int8-g8"]
    assert list(bad) == ["int4-g32"]
    assert "cannot run" in bad["int4-g32"]


def test_fewer_bytes_take_less_time_and_missing_arithmetic_none():
    config = CONFIG
    sheet, old = device_sheet("h200-sxm"), device_sheet("v100-sxm-32gb")
    plain, w8a8 = plain_shapes(config), plain_shapes(config, "w8a8-all")
    times = [decode_ms(model, None, sheet, 8, 512) for model in (plain, w8a8)]
    assert times[0] > times[1] > 0
    assert decode_ms(plain, "int8-g8", sheet, 64, 4096) < decode_ms(plain, None, sheet, 64, 4096)
    assert decode_ms(w8a8, None, old, 8, 512) is None
    assert jax.tree.leaves(plain.params)[0].dtype == jnp.bfloat16
