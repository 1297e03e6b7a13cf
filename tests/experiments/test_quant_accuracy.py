"""The sweep of quantization schemes: its rows, what an interrupted one goes on with, tables and pictures of it."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

import jllm
import jllm.analysis.evaluate
from experiments import quant_accuracy
from experiments.accuracy import mixture
from experiments.accuracy import own as accuracy_own
from experiments.accuracy import rows as accuracy_rows
from experiments.accuracy import support as accuracy_support
from experiments.texts import write
from experiments.texts.read import BUNDLED_TEXT, read_documents, usual_protocol
from jllm.analysis.evaluate import Evaluation, Part
from jllm.analysis.protocols import PROTOCOLS
from jllm.errors import ConfigError, InputFileError
from jllm.files.save import save
from jllm.model.params import matrices
from jllm.quant.quantize import quantize
from jllm.quant.schemes import PRESETS
from pallas_kernels.bench.command import RECORDED
from tests.tiny import CONFIG, experts_model, tiny_model

TEXT = "Once upon a time there was a king who had three daughters. " * 40


class Pieces:
    """Each character a token."""

    bos_id, eos_ids = 1, (2,)

    def encode(self, text, add_bos=True):
        return [1] * add_bos + [3 + ord(c) % 90 for c in text]


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs the command with a tiny model on a text; returns its status and, if there is one, its result."""
    (tmp_path / "text.txt").write_text(TEXT)
    model = tiny_model(tokenizer=Pieces(), context=640)
    monkeypatch.setattr(quant_accuracy.jllm, "load", lambda *args, **options: model)

    def run(*options, text="text.txt"):
        given = ["--text", str(tmp_path / text), "--results", str(tmp_path), "--tokens", "1024", "--layers"]
        status = quant_accuracy.main([*given, *options])
        results = list(tmp_path.glob("quant_accuracy_text-*.json"))
        return status, json.loads(results[0].read_text()) if results else None

    return run


@pytest.fixture
def evaluated(monkeypatch):
    """What was evaluated, by KV format; the formats of `fail` are interrupted."""
    calls, fail = [], []

    def evaluate(model, texts, protocol, *, reference, kv_cache, backend, page_size):
        calls.append(kv_cache)
        if kv_cache in fail:
            raise KeyboardInterrupt
        return Evaluation(
            PROTOCOLS["windows-512"], (Part(10, None, 12.0, 11.0, 0.5, 9), Part(10, None, 9.0, 9.0, 0.1, 8))
        )

    monkeypatch.setattr(accuracy_rows, "evaluate", evaluate)
    monkeypatch.setattr(quant_accuracy, "record", lambda *args, **options: None)
    evaluate.calls, evaluate.fail = calls, fail
    return evaluate


def test_parts_of_a_mixture_are_rounded_in_turn(sweep, monkeypatch, capsys):
    model = experts_model()
    model = replace(model, config=replace(model.config, context=640), tokenizer=Pieces())
    monkeypatch.setattr(quant_accuracy.jllm, "load", lambda *args, **options: model)
    status, result = sweep("--schemes", "bf16", "--kv", "--mixture", "12", "2")
    rows = [row for row in result["rows"] if row["part"] == "mixture"]
    assert status == 0
    assert [(row["module"], row["bits"]) for row in rows] == [(m, b) for m in mixture.PARTS for b in (12, 2)]
    assert all(row["kl"] < 1e-3 and row["routes"] < 0.01 for row in rows[::2])
    assert all(row["kl_95"][0] < row["kl"] < row["kl_95"][1] and row["kl"] > 0.01 for row in rows[1::2])
    experts, attention, router = rows[1::2]
    assert experts["routes"] == 0 < min(attention["routes"], router["routes"]), "the last layer alone has experts"
    assert experts["kl_replayed"] == experts["kl"]
    assert router["kl_replayed"] < router["kl"]
    assert sweep("--schemes", "bf16", "--kv", "--mixture", "8", "1")[0] == 2
    model = replace(model, params=quantize(model.params, "w8a8"))
    assert sweep("--schemes", "bf16", "--kv", "--mixture", "8")[0] == 2
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")] == [
        "error: --mixture takes 2 to 16 bits, not 1",
        "error: --mixture takes a model with experts whose weights are not quantized",
    ]


def test_another_route_counts_once_and_a_replay_undoes_it():
    """Two experts change places in the router."""
    model = experts_model()
    mlp = model.params.layers[1].mlp
    router = mlp.router.at[jnp.asarray([0, 1])].set(mlp.router[jnp.asarray([1, 0])])
    layer = replace(model.params.layers[1], mlp=replace(mlp, router=router))
    changed = replace(model, params=replace(model.params, layers=(model.params.layers[0], layer)))
    tokens = jnp.arange(3, 60, dtype=jnp.int32)
    _, routes = mixture.routed(model.params, tokens, {}, config=model.config)
    found = mixture.of_window(changed, model, tokens)
    one = ((routes["layers.1.routes"] < 2).sum(axis=1) == 1).mean()
    assert found["routes"] == pytest.approx(float(one) / 2)
    assert found["kl"] > found["kl_replayed"] > 0
    assert mixture.of_window(model, model, tokens) == {"kl": 0, "kl_replayed": 0, "routes": 0}
    for name, fields in (("attention", {"qkv", "o"}), ("router", {"router"}), ("experts", {"gate_up", "down"})):
        got, own = (matrices(each.layers[1]) for each in (mixture.rounded_part(model.params, name, 3), model.params))
        assert {field for field in own if (got[field] != own[field]).any()} == fields
        assert mixture.rounded_part(model.params, name, 3).layers[0].mlp == model.params.layers[0].mlp, "it is dense"
    wide = jnp.concatenate([mlp.down, mlp.down[:, :5]], axis=1)
    assert (mixture.round_groups(wide, 3)[:, :32] == mixture.round_groups(mlp.down, 3)).all(), "the last group is short"
    values = mixture.round_groups(mlp.down, 3).reshape(-1, 32)
    assert max(len(set(row.tolist())) for row in values) <= 8
    largest = [abs(each).max(axis=1) for each in (values, mlp.down.reshape(-1, 32))]
    assert jnp.allclose(*largest, rtol=1e-6, atol=0)


def names(result):
    return [(row["scheme"], row["kv"]) for row in result["rows"]]


def test_goes_on_where_it_was_interrupted(sweep, evaluated, capsys):
    options = ["--schemes", "bf16", "--kv", "int8-g8", "int4-g8"]
    evaluated.fail.append("int4-g8")
    assert sweep(*options)[0] == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to go on with row 3\n"
    assert evaluated.calls == [None, "int8-g8", "int4-g8"]
    evaluated.fail.clear()
    status, result = sweep(*options)
    assert (status, evaluated.calls[3:]) == (0, ["int4-g8"])
    assert result["complete"]
    assert names(result) == [("bf16", "model"), ("bf16", "int8-g8"), ("bf16", "int4-g8")]
    assert {row["protocol"] for row in result["rows"]} == {"windows-512"}
    sweep(*options)  # one that was finished begins anew
    assert len(evaluated.calls) == 7


def test_another_sweep_does_not_go_on_with_it(sweep, evaluated, capsys):
    evaluated.fail.append("int4-g8")
    options = ["--schemes", "bf16", "--kv", "int4-g8"]
    _, left = sweep(*options, "--tokens", "512")
    assert sweep(*options, "--tokens", "513") == (2, left)
    assert "has rows of another run (command differ)" in capsys.readouterr().err
    assert evaluated.calls == [None, "int4-g8"]
    evaluated.fail.clear()
    assert sweep(*options, "--tokens", "513", "--label", "more")[0] == 0
    assert sweep(*options, "--tokens", "512")[1]["complete"]
    assert evaluated.calls[2:] == [None, "int4-g8", "int4-g8"]


def test_nor_does_one_of_another_checkpoint_or_an_edited_scheme(sweep, evaluated, tmp_path, capsys):
    """Under the same names; a copy of the checkpoint is the same."""
    for folder, seed in (("a", 0), ("b", 1), ("c", 0)):
        save(tmp_path / folder / "m", tiny_model(seed=seed).params, CONFIG)
    rules = tmp_path / "half.toml"

    def run(folder: str, scheme: str):
        rules.write_text(f'rules = [["o_proj", "{scheme}"]]')
        options = ["--schemes", str(rules), "--kv", "int4-g8", "--model", str(tmp_path / folder / "m")]
        status, _ = sweep(*options)
        (file,) = tmp_path.glob("quant_accuracy_m_text-*.json")
        return status, capsys.readouterr(), json.loads(file.read_text())

    evaluated.fail.append("int4-g8")
    status, _, left = run("a", "w8a16")
    assert (status, [row["scheme"] for row in left["rows"]]) == (130, ["half"])
    for folder, scheme, named in (("b", "w8a16", "weights"), ("a", "w8a8", "scheme half")):
        status, said, after = run(folder, scheme)
        assert (status, said.err.count("\n"), after) == (2, 1, left)
        assert f"has rows of another run ({named} differ): give this one a --label" in said.err
    evaluated.fail.clear()
    status, said, done = run("c", "w8a16")
    assert (status, done["complete"], names(done)) == (0, True, [("half", "model"), ("bf16", "int4-g8")])
    assert "half  " in said.out
    assert "half.toml" not in said.out


OWN = """
from dataclasses import dataclass

import jax.numpy as jnp

from jllm.quant.schemes import Scheme
from pallas_kernels.formats.kv_formats import KVFormat

HALF = Scheme("half", (("o_proj", "w8a16"),))
NUMBER = 7


def coarse(weight):
    return jnp.round(weight * 16) / 16


coarse.bits = 6


def flat(weight):
    return weight.reshape(-1)


@dataclass(frozen=True)
class Wide(KVFormat):
    dtype: str = "float32"


def __getattr__(name):
    raise SystemExit(3) if name == "leaves" else AttributeError(name)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module in the current directory, which is on no path."""
    (tmp_path / "own_schemes.py").write_text(OWN)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": TEXT[a : a + 60 + a]}) + "\n" for a in (0, 7, 21)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    accuracy_own.own.cache_clear()
    yield
    sys.modules.pop("own_schemes", None)
    accuracy_own.own.cache_clear()


def test_what_is_ones_own_is_measured_beside_the_rest(sweep, own, capsys, tmp_path):
    options = ["--schemes", "w8a16", "--kv", "--protocol", "document"]
    for name in ("coarse", "HALF", "Wide"):
        options += ["--scheme", f"own_schemes:{name}"]
    between = ["--between", "own_schemes:coarse", "w8a16", "--between", "own_schemes:Wide", "w8a16/model"]
    status, result = sweep(*options, *between, "--layers", "own_schemes:coarse", text="text.jsonl")
    assert status == 0
    found = {(row["scheme"], row["kv"]): row for row in result["rows"] if row["part"] == "scheme"}
    assert list(found) == [
        ("w8a16", "model"),
        ("own_schemes:coarse", "model"),
        ("own_schemes:HALF", "model"),
        ("bf16", "own_schemes:Wide"),
    ]
    coarse, wide = found["own_schemes:coarse", "model"], found["bf16", "own_schemes:Wide"]
    assert (coarse["bytes_per_weight"], wide["bytes_per_kv"], wide["kl"]) == (0.75, 4.0, pytest.approx(0, abs=1e-6))
    assert coarse["kl"] > 3 * found["w8a16", "model"]["kl"] > 0
    layers = [row for row in result["rows"] if row["part"] == "layer"]
    assert {row["scheme"] for row in layers} == {"own_schemes:coarse"}
    pair, other = (row for row in result["rows"] if row["part"] == "pair")
    assert pair["kl"] == pytest.approx(coarse["kl"] - found["w8a16", "model"]["kl"], rel=1e-3)
    assert pair["kl_95"][0] <= pair["kl"] <= pair["kl_95"][1]
    assert pair["perplexity"] == pytest.approx(
        coarse["perplexity"] / found["w8a16", "model"]["perplexity"] - 1, abs=1e-4
    )
    assert (other["over_scheme"], other["kl"] < 0) == ("w8a16", True)
    shown = capsys.readouterr().out
    assert "3 documents" in shown
    assert "less weights" in shown
    (file,) = tmp_path.glob("quant_accuracy_text-*")
    assert f"Written: {file}" in shown.splitlines()


def test_outliers_are_planted_beside_a_plain_reference(sweep, evaluated, tmp_path, monkeypatch):
    recorded = []
    monkeypatch.setattr(quant_accuracy, "record", lambda model, *args, **options: recorded.append(model))
    planted, jobs = [], quant_accuracy.jobs
    monkeypatch.setattr(quant_accuracy, "jobs", lambda *given: planted.append(given[0]) or jobs(*given))
    assert sweep("--outliers", "kv:8", "--schemes", "bf16", "--kv")[0] == 0
    assert len([*tmp_path.glob("quant_accuracy_text_kv-8-*.json")]) == 1
    (plain,), (model,) = recorded, planted
    assert plain is quant_accuracy.jllm.load()
    assert not jnp.array_equal(model.params.layers[0].attention.qkv, plain.params.layers[0].attention.qkv)


def test_a_rule_for_everything_is_warned_of(sweep, evaluated, tmp_path, capsys):
    for name, rule in (("all", "*"), ("layers", "*_proj")):
        (tmp_path / f"{name}.toml").write_text(f'rules = [["{rule}", "w8a16"]]')
    assert sweep("--schemes", str(tmp_path / "all.toml"), str(tmp_path / "layers.toml"), "--kv")[0] == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert line.startswith("warning: scheme all: the rule '*' takes embed_tokens and lm_head beside the layers, which")


def test_an_edited_module_does_not_go_on_with_rows_of_before(sweep, own, evaluated, tmp_path, capsys):
    options = ["--schemes", "bf16", "--scheme", "own_schemes:coarse", "--kv", "int4-g8"]
    evaluated.fail.append("int4-g8")
    assert sweep(*options)[0] == 130
    (tmp_path / "own_schemes.py").write_text(OWN.replace("* 16", "* 32"))
    assert sweep(*options)[0] == 2
    assert "has rows of another run (scheme own_schemes:coarse differ)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scheme", "own_schemes:nothing"], "own_schemes:nothing: cannot be imported as package.module:NAME (Attr"),
        (["--scheme", "own_schemes:leaves"], "cannot be imported as package.module:NAME (SystemExit: 3)"),
        (["--scheme", "no_such_module:x"], "cannot be imported as package.module:NAME (ModuleNotFoundError: No module"),
        (["--scheme", "nf4"], "nf4: cannot be imported as package.module:NAME"),
        (
            ["--scheme", "own_schemes:NUMBER"],
            "must be a Scheme, a KVFormat or a function of a weight [outputs, inputs]",
        ),
        (
            ["--scheme", "own_schemes:flat"],
            "own_schemes:flat: must return a weight of the shape (128, 32), not (4096,)",
        ),
        (["--layers", "own_schemes:Wide"], "own_schemes:Wide: is a KV format, not a scheme of weights"),
        (["--kv", "own_schemes:HALF"], "own_schemes:HALF: is a scheme of weights, not a KV format"),
        (
            ["--kv", "fp8", "--schemes", "fp8", "--between", "fp8", "bf16"],
            "--between fp8: it is a scheme and a KV format: say fp8/model or bf16/fp8",
        ),
        (["--between", "nf4", "bf16"], "--between nf4: this run has no such scheme or KV format; it has bf16/model"),
    ],
)
def test_what_is_none_of_ones_own_is_refused(sweep, own, capsys, options, message):
    status, result = sweep("--schemes", "bf16", "--kv", *options)
    error = capsys.readouterr().err
    assert (status, result) == (2, None)
    assert message in error
    assert error.count("\n") == 1


def test_the_pages_quantizer_is_one(sweep, own, tmp_path):
    page = (Path(quant_accuracy.__file__).parents[1] / "docs" / "experiments.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def int3" in block]
    lines = code.strip().splitlines()
    assert len(lines) - lines.index(next(line for line in lines if line.startswith("def"))) <= 10
    (tmp_path / "own_schemes.py").write_text(code.replace("64", "16"))
    status, result = sweep("--schemes", "w8a16", "--scheme", "own_schemes:int3", "--kv")
    assert status == 0
    eight, three = result["rows"]
    assert (three["bytes_per_weight"], three["kl"] > eight["kl"] > 0) == (0.5, True)


def test_a_log_has_the_progress_of_a_long_sweep(capsys, monkeypatch):
    """Where standard error is no terminal, too."""
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    todo = [quant_accuracy.Job({"part": "scheme", "scheme": name}, 1, lambda: [{}]) for name in ("nf4", "fp8")]
    assert list(quant_accuracy.rows(todo, [])) == [{}, {}]
    assert re.search(r"sweep: +\d+%.* [12]/2 .*scheme (nf4|fp8)", capsys.readouterr().err)


def test_a_name_that_two_schemes_have_is_refused(sweep, tmp_path, capsys):
    for name in ("w8a16", "mine"):
        (tmp_path / f"{name}.toml").write_text(f'name = "{name}"\nrules = [["o_proj", "w8a16"]]')
    (tmp_path / "other.toml").write_text('name = "mine"\nrules = [["o_proj", "fp8"]]')
    for files in (["w8a16.toml"], ["mine.toml", "other.toml"]):
        assert sweep("--schemes", *(str(tmp_path / file) for file in files))[0] == 2
        assert "another scheme is called" in capsys.readouterr().err


def test_results_of_users_are_not_the_committed_ones(sweep, evaluated, tmp_path, monkeypatch):
    committed = {path: path.stat().st_mtime_ns for path in RECORDED.iterdir()}
    monkeypatch.chdir(tmp_path)
    text = ["--text", str(tmp_path / "text.txt"), "--tokens", "1024"]
    assert quant_accuracy.main([*text, "--schemes", "w8a8-all", "--kv", "--layers"]) == 0
    assert len([*(tmp_path / "results").glob("*.json")]) == 1
    assert {path: path.stat().st_mtime_ns for path in RECORDED.iterdir()} == committed


def test_the_grid_with_k_and_v_apart(sweep, evaluated):
    _, result = sweep("--schemes", "bf16", "w8a16", "--kv", "model", "k=int8-g8,v=model", "--grid")
    each = "k=int8-g8,v=model"
    assert names(result) == [("bf16", "model"), ("bf16", each), ("w8a16", "model"), ("w8a16", each)]
    row = result["rows"][0]
    assert (row["kl"], row["top1"], row["added"]) == (0.03, 0.85, pytest.approx(0.05127, abs=1e-5))
    assert [row["bytes_per_kv"] for row in result["rows"]] == [2.0, 1.625, 2.0, 1.625]
    assert row["kl_95"][0] <= row["kl"] <= row["kl_95"][1]
    assert evaluated.calls == [None, "k=int8-g8,v=f32"] * 2


def test_every_default_format_is_one():
    for head_dim in (16, 64, 128):
        config = replace(CONFIG, head_dim=head_dim)
        for kv in accuracy_rows.default_kv(head_dim):
            jllm.model.cache.parse_kv_cache(accuracy_rows.kv_name(kv, "float32"), config, "float32")
    assert set(quant_accuracy.BOTH) <= {
        (scheme, kv) for scheme in quant_accuracy.SCHEMES for kv in accuracy_rows.default_kv(64)
    }


def test_two_runs_have_equal_figures_and_tables(sweep, tmp_path, capsys):
    """The whole sweep on a tiny model, nothing pretended."""
    options = [
        "--schemes",
        "w8a16",
        "--kv",
        "int4-g8",
        "--layers",
        "w8a16",
        "--protocol",
        "document",
        "--tokens",
        "300",
    ]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": TEXT[a : a + 90]}) + "\n" for a in (0, 7, 21)))
    status, first = sweep(*options, text="text.jsonl")
    shown = capsys.readouterr().out
    assert status == 0
    kept = {part: [row for row in first["rows"] if row["part"] == part] for part in ("scheme", "layer")}
    assert [len(rows) for rows in kept.values()] == [2, 2]
    assert {row["parts"] for row in kept["scheme"]} == {3}
    assert all(row["kl"] > 0 and row["snr_db"] > 20 for row in kept["layer"])
    assert "bytes/weight" in shown
    status, second = sweep(*options, text="text.jsonl")
    assert status == 0
    assert first.pop("seconds") > 0 < second.pop("seconds")
    assert first.pop("host").keys() == second.pop("host").keys()
    assert second == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schemes", "bf16", "w8a61"], "unknown quantization scheme 'w8a61'"),
        (["--schemes", "bf16", "w8a61"], "what can: bf16"),
        (
            ["--schemes", "bf16", "nf4"],
            "scheme nf4 cannot run: model.layers.0.self_attn.qkv_proj: nf4 cannot hold shape",
        ),
        (["--kv", "int8-g7"], "int8-g7"),
        (["--protocol", "windows"], "unknown protocol 'windows'; near ones: windows-512"),
        (["--tokens", "100"], "the text has 100 tokens, a window takes 512"),
        (["--protocol", "wikitext2-2048"], "the model's context is 640"),
        (["--backend", "mosaic"], "backend 'mosaic' needs a Hopper GPU"),
        (["--grid", "--kv"], "--grid takes at least one KV format"),
    ],
)
def test_refused_before_anything_is_written(sweep, capsys, monkeypatch, options, message):
    monkeypatch.setattr(jllm.analysis.evaluate, "score_windows", None)
    monkeypatch.setattr(jllm.analysis.evaluate, "read_states", None)
    status, result = sweep(*(["--schemes", "bf16"] if "--schemes" not in options else []), *options)
    error = capsys.readouterr().err
    assert (status, result) == (2, None)
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_what_a_backend_cannot_run_is_said_with_what_can(monkeypatch):
    """Heads of 16 have no kernel; on a Hopper GPU with heads of 64, plain weights have."""
    monkeypatch.setattr(accuracy_support, "on_hopper", lambda: True)
    pairs = [("bf16", "model"), ("w8a16", "int8-g8")]
    with pytest.raises(ConfigError, match="backend 'mosaic': .* cannot run: .*; what can: nothing that was asked for$"):
        accuracy_support.check_all_run(tiny_model("bfloat16"), pairs, (), "mosaic", PRESETS)
    accuracy_support.check_all_run(tiny_model(), pairs, (), "xla", PRESETS)


def row_of(scheme, kv, kl, added=0.0):
    return {"part": "scheme", "scheme": scheme, "kv": kv, "kl": kl, "added": added}


def test_the_bundled_text_is_the_models_own():
    """40 documents with their seeds; the file names who wrote it. Writing again goes by the seed alone."""
    assert len(read_documents(BUNDLED_TEXT)) == write.DOCUMENTS
    lines = BUNDLED_TEXT.read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == list(range(write.DOCUMENTS))
    assert "wrote it itself" in (BUNDLED_TEXT.parent / "README.md").read_text()


def test_documents_are_written_by_seed(monkeypatch):
    asked = []

    def generate(model, prompts, sampling):
        asked.append((prompts, [(s.seed, s.temperature, s.top_k, s.top_p, s.min_p) for s in sampling]))
        return [jllm.Completion((), str(s.seed), "stop", None, None, None) for s in sampling]

    monkeypatch.setattr(write.jllm, "generate", generate)
    model = tiny_model(bos_id=1)
    assert write.documents(model, 2) == [{"seed": 0, "text": "0"}, {"seed": 1, "text": "1"}]
    assert asked == [([[1], [1]], [(0, 1.0, 0, 1.0, 0.0), (1, 1.0, 0, 1.0, 0.0)])]


def test_wikitext_is_read_by_name(tmp_path, monkeypatch):
    """A folder named like the dataset stands for the Hub. Lines are joined with their own line breaks, as GPTQ does."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, lines in (("wikitext-2-raw-v1", ["", " = A title = \n", " Its text .\n"]), ("another", ["no"])):
        for split in ("train", "test"):
            table = datasets.Dataset.from_dict({"text": lines if split == "test" else ["not this"]})
            table.to_parquet(tmp_path / f"Salesforce/wikitext/{name}/{split}-00000-of-00001.parquet")
    cards = [
        {"config_name": name, "data_files": [{"split": s, "path": f"{name}/{s}-*"} for s in ("train", "test")]}
        for name in ("wikitext-2-raw-v1", "another")
    ]
    (tmp_path / "Salesforce/wikitext/README.md").write_text(f"---\nconfigs: {json.dumps(cards)}\n---\n")
    found = read_documents(Path("wikitext"))
    assert found == ["\n\n = A title = \n\n\n Its text .\n"]
    assert usual_protocol(Path("wikitext"), found, 4096) == "wikitext2-2048"
    assert usual_protocol(Path("wikitext"), found, 1024) == "windows-512"

    def offline(*args, **more):
        raise ConnectionError("no network\nRetrying")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(InputFileError, match=r"^--text wikitext: .* cannot be read: no network; a file's path works"):
        read_documents(Path("wikitext"))
    Path("wikitext").write_text("my own")
    assert read_documents(Path("wikitext")) == ["my own"]
    assert usual_protocol(Path("wikitext"), ["my own"], 4096) == "windows-512"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"txt": 1}\n', r'f\.jsonl:2: expected \{"text"'),
        (b'\n{"text" "a"}\n', r"f\.jsonl:2: not valid JSON"),
        (b"\n", "has no documents"),
        (b"\xff", "is not UTF-8: byte 0"),
        (None, "cannot be read: No such file"),
    ],
)
def test_broken_texts_name_the_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "f.jsonl").write_bytes(content)
    with pytest.raises(InputFileError, match=message):
        read_documents(tmp_path / "f.jsonl")
