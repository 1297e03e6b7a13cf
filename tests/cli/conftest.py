"""A tiny model with a tokenizer and a chat template, and the command line run on it."""

import json
import signal
from pathlib import Path

import pytest

import jllm
from jllm.cli.main import main
from jllm.files.save import save
from tests.cli.cases import TEMPLATE, WORDS
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A model directory with a tokenizer and a chat template."""
    import sentencepiece

    path = tmp_path_factory.mktemp("model")
    text = (" ".join(WORDS[i % len(WORDS)] for i in range(start, start + 12)) for start in range(200))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text,
        model_prefix=str(path / "tokenizer"),
        vocab_size=320,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    size = len((path / "tokenizer.vocab").read_text().splitlines())
    model = tiny_model(num_layers=1, vocab_size=size, tie_embeddings=True)
    save(path, model.params, model.config)
    return path


@pytest.fixture(scope="session")
def model(folder) -> jllm.Model:
    return jllm.load(folder)


@pytest.fixture
def run(folder, capsys):
    """Runs the command line on the tiny model: exit status, standard output, standard error. Equal sizes for all, so
    that the steps are compiled once."""

    def run(*args: object, model: Path = folder) -> tuple[int, str, str]:
        flags = ["--model", model, "--max-slots", 4, "--max-step-tokens", 32, "--no-compile-cache"]
        try:
            status = main([str(a) for a in (*flags, *args)])
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def lines(tmp_path) -> Path:
    """More requests than slots, of all kinds."""
    requests = [{"prompt": " ".join(WORDS[i : i + 3]), "id": f"r{i}"} for i in range(9)]
    requests += [
        {"prompt": [5, 6, 7], "temperature": 0, "max_new_tokens": 3},
        {"messages": [{"role": "user", "content": "who?"}], "n": 2, "seed": 99},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in requests))
    return path


@pytest.fixture(autouse=True)
def sigint():
    """Whatever a test makes of Ctrl-C, the next one finds it as it was."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
