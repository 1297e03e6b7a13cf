"""Options that several experiments share."""

import importlib
import os
import subprocess
import sys

import jax
import pytest

from experiments import (
    decode_step,
    long_context,
    measure_all,
    ptq_methods,
    qps,
    quant_accuracy,
    quant_steps,
    simulate,
    speculation,
    start_up,
    step_profile,
    throughput,
)
from experiments.claims import __main__ as claims
from experiments.drafts import steps
from experiments.serving import engines
from pallas_kernels.bench.command import Parser, make_parser, record
from pallas_kernels.decode_attention import bench as decode_attention
from pallas_kernels.int8_matmul import bench as int8_matmul
from pallas_kernels.norm_quant import bench
from pallas_kernels.prefill_attention import bench as prefill_attention


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "²", "many", ""])
def test_counts_are_whole_numbers_from_1_on(text, capsys):
    with pytest.raises(SystemExit):
        qps.main(["--slots", text])
    assert "is not a whole number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "options", "says"),
    [
        (qps.main, ["--warmup", "-5"], "'-5' is not a whole number from 0 on"),
        (qps.main, ["--rate", "0"], "'0' is not a positive number"),
        (qps.parse_args, ["--seed", str(2**64)], f"'{2**64}' is not a whole number from 0 to 4294967295"),
        (qps.main, ["--pool-gib", "nan"], "'nan' is not a positive number of GiB, 8589934592 at most"),
        (simulate.parse_args, ["--pool-gib", "16", "1e300"], "'1e300' is not a positive number of GiB"),
        (qps.parse_args, ["--replicas", "2", "--trace", "x"], "--trace is of one engine: leave --replicas out"),
        (qps.parse_args, ["--backend", "default", "xla", "--trace", "x"], "each --backend has its own: give one"),
        (qps.parse_args, ["--url", "http://x/v1", "--pages", "9"], "--pages has no meaning with --url: the server"),
        (qps.parse_args, ["--url", "http://x/v1", "--slots", "512"], "--slots has no meaning with --url"),  # as default
        (qps.parse_args, ["--peer-names", "vllm"], "--peer-names needs --peers"),
        (throughput.parse_args, ["--peer-names", "torch"], "--peer-names needs --peers"),
        (throughput.parse_args, ["--peer-seconds", "9"], "--peer-seconds needs --peers"),
        (qps.parse_args, ["--peer-names", "transformers", "vllm"], "--peer-names needs --peers"),  # as default
        (qps.parse_args, ["--peer-seconds", "110"], "--peer-seconds needs --peers"),
        (qps.parse_args, ["--peer-settings", "x=1"], "--peer-settings needs --peers"),
        (throughput.parse_args, ["--peer-names", "torch", "vllm"], "--peer-names needs --peers"),
        (throughput.parse_args, ["--peer-seconds", "120"], "--peer-seconds needs --peers"),
        (decode_attention.main, ["--peer-seconds", "60"], "--peer-seconds needs --peers"),
        (prefill_attention.main, ["--peer-seconds", "40"], "--peer-seconds needs --peers"),
        (int8_matmul.main, ["--peer-seconds", "60"], "--peer-seconds needs --peers"),
        (step_profile.parse_args, ["--input", "8"], "--input has no meaning with --kind decode, which takes --context"),
        (step_profile.parse_args, ["--kind", "serve", "--input", "8"], "--input has no meaning with --kind serve"),
        (step_profile.parse_args, ["--kind", "prefill", "--context", "256"], "which takes --input"),
        (decode_step.main, ["--dtype", "f17"], "'f17' is not known; known are bf16, f16, f32"),
        (decode_step.main, ["--page-size", "7"], "invalid choice: 7"),
        (decode_step.main, ["--backend", "cuda"], "invalid choice: 'cuda'"),
        (bench.main, ["--rows", "7"], "invalid choice: 7"),
        (simulate.main, ["--page-size", "9"], "invalid choice: 9"),
        (quant_steps.main, ["--schemes", "foo"], "unknown quantization scheme 'foo'"),
        (quant_steps.main, ["--stages", "decode:bf16:1:foo"], "unknown quantization scheme 'foo'"),
        (quant_steps.main, ["--stages", "decode:bf16:0"], "is not a stage such as"),
        (ptq_methods.main, ["--models", "kv:3"], "a power of two keeps the function"),
        (quant_accuracy.main, ["--outliers", "kw:8"], "'kw:8' is not KIND[:STRENGTH[:SEED]]"),
        (speculation.main, ["acceptance", "--temperatures", "nan"], "'nan' is not a number from 0 on"),
        (speculation.main, ["steps", "--copies", "foo"], "unknown quantization scheme 'foo'"),
        (ptq_methods.main, ["--label", ""], "must be letters, digits"),
        (long_context.main, ["--windows", "1"], "--windows 1: an interval over windows takes at least 2"),
    ],
)
def test_a_value_that_none_could_mean_ends_the_command_before_anything_runs(main, options, says, capsys):
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "options", "says"),
    [
        (decode_step.main, ["--kv-cache", "foo"], "unknown KV format 'foo'"),
        (decode_step.main, ["--layers", "33"], "--layers 33: configs/llama-2-7b.json has 32"),
        (decode_step.main, ["--context", "5000"], "the model's context is 4096"),
        (throughput.main, ["--kv-cache", "foo"], "unknown KV format 'foo'"),
        (step_profile.main, ["--kind", "prefill", "--input", "5000"], "the model's context is 4096"),
        (step_profile.main, ["--config", "none.json"], "none.json: cannot be read"),
        (quant_steps.main, ["--stages", "decode:foo:1"], "unknown KV format 'foo'"),
        (quant_steps.main, ["--config", "none.json"], "none.json: cannot be read"),
        (speculation.main, ["steps", "--kv-cache", "foo"], "unknown KV format 'foo'"),
        (speculation.main, ["rejection", "--drafter", "foo"], "speculate='foo' is not known"),
        (speculation.main, ["acceptance", "--tokens", "64", "1000"], "the model's context is 1024"),
        (start_up.main, ["--kv-cache", "foo"], "unknown KV format 'foo'"),
        (start_up.main, ["--processes", "65"], "an integer from 0 to 64"),
        (qps.main, ["--top-p", "0"], "top_p must be in (0, 1]"),
        (qps.main, ["--length-predictor", "wrong"], "a length predictor must be one of"),
        (qps.main, ["--kv-cache", "foo"], "unknown KV format 'foo'"),
        (qps.main, ["--pages", "1"], "num_pages must be at least max_slots"),
        (qps.main, ["--pool-gib", "1e-9"], "num_pages must be an integer >= 1"),
        (qps.main, ["--allow", "5000"], "the model's context is 4096"),
        (long_context.main, ["--text", "none.txt"], "none.txt: cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_made(main, options, says, tmp_path, monkeypatch, capsys):
    def make(*_: object, **__: object) -> None:
        raise AssertionError("weights were made")

    for module, name in (
        (decode_step, "random_params"), (throughput, "random_params"), (step_profile, "random_params"),
        (quant_steps, "random_params"), (steps, "random_params"), (start_up, "measure"), (long_context, "ask"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, make)
    made = engines.make_model
    monkeypatch.setattr(qps, "make_model", lambda args: made(args) if args.host_only else make())
    assert main([*options, "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="of machines without a GPU")
@pytest.mark.parametrize("main", [decode_step.main, throughput.main, step_profile.main, qps.main])
def test_a_backend_of_gpus_is_refused_without_one(main, tmp_path, capsys):
    assert main(["--backend", "mosaic", "--results", str(tmp_path)]) == 2
    assert "--backend mosaic needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("train_needle", ["--out", "list.json"], "list.json: cannot be made a folder"),
        ("train_length_predictor", ["--out", "."], "it is a folder, give a file"),
        ("train_length_predictor", ["--workload", "none/x.jsonl"], "there is no folder none"),
        ("train_length_predictor", ["--texts", "4"], "--texts 4: must be at least 5"),
        ("train_heads", ["--corpus", "none.txt", "--valid", "none.txt"], "none.txt"),
        ("train_small", ["--corpus", "none.txt"], "none.txt"),
    ],
)
def test_training_is_refused_before_it_begins(name, options, says, tmp_path, monkeypatch, capsys):
    pytest.importorskip("optax")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    assert importlib.import_module(f"experiments.{name}").main(options) == 2
    assert says in capsys.readouterr().err


def test_a_dtype_has_its_short_name_too():
    assert decode_step.parse_args(["--dtype", "bf16"]).dtype == "bfloat16"


def test_a_file_of_rules_is_named_as_it_says(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text('name = "half"\nrules = [["o_proj", "w8a16"]]')
    assert (
        throughput.name_of(throughput.parse_args(["--scheme", str(file)])) == "throughput_llama-2-7b_half_kv-bfloat16"
    )
    assert qps.name_of(qps.parse_args(["--quantize", str(file)])) == "qps_llama-2-7b_half"
    assert qps.name_of(qps.parse_args([])) == "qps_llama-2-7b_bfloat16"


@pytest.fixture
def unread():
    """A file whose reader has ended, as when a command's output goes to `head`."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as file:
        yield file


def test_a_command_ends_quietly_with_the_reader_of_its_output(unread):
    """A line, which waits in Python's buffer until the command ends."""
    command = [sys.executable, "-m", "experiments.measure_all", "--list", "--only", "C23"]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, text=True, env=buffered)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "run",
    [
        lambda: claims.main(["C22"]),
        lambda: quant_accuracy.main([]),
        lambda: record("x", make_parser(None).parse_args([]), [], [{}], lambda rows: ()),
    ],
    ids=["claims", "quant_accuracy", "benches"],
)
def test_a_reader_that_has_ended_is_no_error_of_a_command(run, unread, tmp_path, monkeypatch, capsys):
    def prints(*_):
        print("a row", flush=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(claims, "test", prints)
    monkeypatch.setattr(quant_accuracy, "sweep", prints)
    monkeypatch.setattr(sys, "stdout", unread)
    assert run() == 141
    assert not capsys.readouterr().err


def test_a_closed_standard_output_is_none(monkeypatch):
    """As `>&-` leaves it."""
    monkeypatch.setattr(sys, "stdout", None)
    assert measure_all.main(["--list"]) == 0


def test_a_parser_knows_what_is_given():
    parser = Parser()
    parser.add_argument("--many", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("files", nargs="*")
    part = parser.add_subparsers(dest="part").add_parser("part")
    part.add_argument("--steps", type=int, default=1)
    assert parser.parse_args(["--many", "1", "part", "--steps", "1"]).many == ["1"]
    for each, option in ((parser, "many"), (part, "steps")):
        each.refuse(("seed", "files"), "{}")
        with pytest.raises(SystemExit):
            each.refuse(("seed", "files", option), "{}")
    parser.parse_args(["part"])
    for each in (parser, part):
        each.refuse(("many", "seed", "files", "steps"), "{}")  # of the last command line alone
