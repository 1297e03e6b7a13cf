"""--quantize, end to end."""

import json
from dataclasses import replace

import pytest

import jllm
from jllm.files.save import save
from jllm.quant.quantize import quantize, weight_formats
from tests.cli.cases import expected

GREEDY = ("--temperature", 0, "--max-new-tokens", 6, "--logprobs", 0, "--json", "the king")


def answer(run, *flags, **options) -> dict:
    status, out, err = run(*flags, *GREEDY, **options)
    assert status == 0, err
    return json.loads(out)


def logprobs(answer) -> list[float]:
    """Of the tokens, which are the same for all weights of so small a model."""
    return [token["logprob"] for token in answer["logprobs"]]


def of_library(model, params) -> list[float]:
    sampling = jllm.SamplingParams(temperature=0, max_new_tokens=6, logprobs=0)
    (done,) = expected(replace(model, params=params), "the king", sampling)
    return [token.logprob for token in done.logprobs]


@pytest.fixture(scope="module")
def wide(model):
    return of_library(model, model.params)


def test_a_preset(run, model, wide):
    got = logprobs(answer(run, "--quantize", "fp8"))
    assert got == pytest.approx(of_library(model, quantize(model.params, "fp8")), abs=1e-5)
    assert got != pytest.approx(wide, abs=1e-3)


def test_a_file_of_rules_and_a_checkpoint_that_is_quantized(run, folder, model, wide, tmp_path):
    rules = tmp_path / "mine.toml"
    rules.write_text('rules = [["layers.0.mlp.*", "w8a16"], ["lm_head", "fp8"]]')
    got = answer(run, "--quantize", rules)
    assert got["settings"]["quantize"] == str(rules)
    assert logprobs(got) != pytest.approx(wide, abs=1e-3)
    params = jllm.load(folder, quantize=rules).params
    assert {fmt.name for fmt in weight_formats(params).values()} == {"w8a16", "fp8"}
    save(tmp_path / "saved", params, model.config)
    for file in folder.glob("tokenizer*"):
        (tmp_path / "saved" / file.name).write_bytes(file.read_bytes())
    assert logprobs(answer(run, model=tmp_path / "saved")) == logprobs(got)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('rules = [["o_prj", "nf4"]]', "pattern 'o_prj' matches no weight; near ones: o_proj"),
        ('rules = [["o_proj", "w4a16-g128"]]', "model.layers.0.self_attn.o_proj: w4a16-g128 cannot hold shape"),
        ("rules = 3", "a scheme needs rules = [[pattern, format], ...]"),
    ],
)
def test_schemes_that_do_not_fit(run, tmp_path, content, words):
    rules = tmp_path / "mine.toml"
    rules.write_text(content)
    status, out, err = run("--quantize", rules, *GREEDY)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1
