"""Training the bundled model: text becomes the rows it should, the loss falls, and the committed files fit together."""

import json
import math
import random
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.config import Experts, LlamaConfig
from jllm.errors import InputFileError
from jllm.files.hf_config import load_config
from jllm.files.load import BUNDLED
from jllm.files.load_params import load_params
from jllm.files.safetensors_io import read_header
from jllm.files.tokenizer import load_tokenizer
from jllm.model.backbone import Packed, packed_logits
from jllm.model.param_specs import init_params
from jllm.step.buckets import Bucket

pytest.importorskip("hypothesis")
pytest.importorskip("optax")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from experiments import grpo, train_heads, train_small  # noqa: E402
from experiments.train_small import hold_out, main  # noqa: E402
from experiments.training import fit, resume  # noqa: E402
from experiments.training.data import Rows, cut_passages, encode, pack, read_books, train_tokenizer  # noqa: E402
from experiments.training.fit import Recipe, Validation, drop_units, imbalance, row_losses, row_nats  # noqa: E402
from tests.tiny import experts_model  # noqa: E402

TINY = LlamaConfig(
    "LlamaForCausalLM", 300, 32, 64, 2, 2, 1, 16, context=64, tie_embeddings=True, bos_id=1, eos_ids=(2,)
)
RECIPE = Recipe(40, 4, 1e-2, 5, 0.1, 0.1, 0.0, 10, 2, 0, "float32")
SHAPE = {"vocab": 320, "width": 32, "ffn": 64, "layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 16, "context": 64}
QUICK = {"steps": 60, "rows": 8, "lr": 0.01, "warmup": 5, "eval-every": 20}


def make_text(paragraphs: int) -> str:
    """Sentences of a tiny grammar, some of them opening a tale, in two books."""
    rng = random.Random(0)
    words = (["king", "witch", "fox", "miller"], ["saw", "fed", "met"], ["a goose", "the moon", "his son"])
    lines = []
    for _ in range(paragraphs):
        start = rng.choice(["Once upon a time the", "Then the", "So the"])
        lines.append(" ".join([start, *(rng.choice(group) for group in words)]) + ".")
    half = paragraphs // 2
    return "\n".join(lines[:half]) + "\n\n" + "\n".join(lines[half:]) + "\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "tales.txt"
    file.write_text(make_text(600), encoding="utf-8")
    return file


def test_a_tiny_model_learns_and_is_saved(corpus, tmp_path, capsys):
    out, options = tmp_path / "model", [f"--{name}={value}" for name, value in (SHAPE | QUICK).items()]
    status = main(["--corpus", str(corpus), "--out", str(out), "--results", str(tmp_path), "--json", *options])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    document = json.loads(captured.out.splitlines()[-1])
    (file,) = tmp_path.glob("train_small-*.json")
    assert json.loads(file.read_text()) == document
    assert document["complete"] is True
    assert [row["step"] for row in document["rows"]] == [20, 40, 60]
    assert document["valid_loss"] < 0.4 * math.log(320)  # where untrained models are
    assert document["rows"][-1]["train_loss"] < document["rows"][0]["train_loss"] / 2

    model = jllm.load(out)
    assert sum(leaf.size for leaf in jax.tree.leaves(model.params)) == document["parameters"]
    text = "Once upon a time the fox met a goose.\nThen “naïve” 雪 12"
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    ids = model.tokenizer.encode("Then the king saw the moon.")
    assert ids[0] == model.config.bos_id
    batch = Packed(*(jnp.asarray(leaf, jnp.int32) for leaf in (ids, range(len(ids)), [0] * len(ids))))
    logits = packed_logits(model.params, model.config, batch)
    nats = -jax.nn.log_softmax(logits[:-1])[jnp.arange(len(ids) - 1), jnp.asarray(ids[1:])]
    assert float(jnp.mean(nats)) < 0.4 * math.log(320)

    assert main(["--corpus", str(corpus), "--out", str(out), "--results", str(tmp_path)]) == 2
    assert "already holds a model" in capsys.readouterr().err


def test_a_mixture_learns_and_grpo_goes_on_with_it(corpus, tmp_path, monkeypatch):
    """Its trainer has the sampler's log-probabilities to the bit, and so its routes."""
    shape = SHAPE | {"context": 128, "experts": 4, "chosen": 2}
    options = [f"--{name}={value}" for name, value in (shape | QUICK | {"steps": 40}).items()]
    assert main(["--corpus", str(corpus), "--out", str(tmp_path / "model"), "--results", str(tmp_path), *options]) == 0
    model = jllm.load(tmp_path / "model", dtype="float32")
    assert (model.config.architecture, model.config.experts) == ("MixtralForCausalLM", Experts(4, 2, 64))
    (file,) = tmp_path.glob("train_small-*.json")
    assert json.loads(file.read_text())["valid_loss"] < 0.6 * math.log(320)
    monkeypatch.setattr(grpo, "reward_of", lambda text, words, ended: len(text) % 7 / 7)
    monkeypatch.setattr(grpo.jllm, "Engine", partial(jllm.Engine, buckets=(Bucket(4, 4, 4),)))  # one size of step
    asked = ["--prompts", "2", "--group", "2", "--new-tokens", "6", "--lr", "0.01", "--quantize", "w8a8"]
    args = grpo.parse_arguments(asked)
    recipe = grpo.Recipe(grpo.Objective(**grpo.of(grpo.Objective, args)), **grpo.of(grpo.Recipe, args))
    rows = list(grpo.curve(model, recipe, 2, None, {}))
    assert [row["gap"] for row in rows] == [0, 0]
    assert rows[0]["kl"] != rows[1]["kl"]


def test_experts_with_equally_many_tokens_have_the_least_imbalance():
    scores = jnp.asarray([[2.0, 0.0], [0.0, 2.0], [5.0, 0.0]])
    routes, used = jnp.asarray([[0], [1], [0]]), jnp.asarray([True, True, False])
    assert float(imbalance(scores, routes, used)) == pytest.approx(1)
    share = float(jax.nn.softmax(scores[0])[0])
    assert float(imbalance(scores[:1], routes[:1], used[:1])) == pytest.approx(2 * share)


def test_the_loss_of_a_mixture_counts_its_imbalance():
    model, place = experts_model(), jnp.arange(9, dtype=jnp.int32)
    row = Rows(place + 3, place + 4, place, 0 * place)
    nats, found = row_losses(model.params, row, model.config)
    rows, recipe = jax.tree.map(lambda x: x[None], row), replace(RECIPE, rows=1, dropout=0.0, balance=0.5)
    loss = fit.mean_nats(model.params, rows, jax.random.key(0), model.config, recipe)
    assert float(loss - nats / 9) == pytest.approx(0.5 * float(found), rel=1e-3)


def test_options_of_mixtures_need_one(capsys):
    for wrong in (["--chosen", "1"], ["--balance", "0.1"], ["--size", "mixture", "--experts", "0", "--chosen", "1"]):
        with pytest.raises(SystemExit):
            train_small.parse_arguments(["--corpus", "tales.txt", *wrong])
        assert f"error: --{'balance' if 'balance' in wrong[0] else 'chosen'} needs --experts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["--corpus", "{tmp}/latin1.txt"], "not UTF-8 at byte 3"),
        (["--corpus", "{tmp}/empty.txt"], "holds no text"),
        (["--corpus", "{tmp}/short.txt"], "too short to hold out"),
        (["--corpus", "{corpus}"], "no vocabulary of 4096"),
        (["--corpus", "{corpus}", "--dropout", "1"], "--dropout 1.0 must be in [0, 1)"),
        (["--corpus", "{corpus}", "--lr", "nan"], "--lr nan must be positive"),
        (["--corpus", "{corpus}", "--steps", "20"], "--warmup 100 must be less than --steps 20"),
        (["--corpus", "{corpus}", "--heads", "3"], "3 query heads are not a multiple of 2 KV heads"),
        (
            ["--corpus", "{corpus}", "--experts", "2", "--chosen", "3"],
            "experts.chosen is 3, but must be at least 1 and at",
        ),
    ],
)
def test_bad_input_gives_one_line_and_status_2(arguments, message, corpus, tmp_path, capsys):
    (tmp_path / "latin1.txt").write_bytes("Café".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "short.txt").write_text("One line.\n")
    filled = [argument.format(tmp=tmp_path, corpus=corpus) for argument in arguments]
    assert main([*filled, "--out", str(tmp_path / "out"), "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_training_keeps_the_best_and_stops_when_the_loss_rises(corpus, monkeypatch):
    losses = iter([3.0, 2.0, 2.6, 2.5, 1.0])
    monkeypatch.setattr(Validation, "loss", lambda *_: next(losses))
    monkeypatch.setattr(fit, "train_steps", lambda state, rows, **_: (state, np.ones(10)))
    books = read_books(corpus)
    seen = list(fit.train(TINY, RECIPE, books, train_tokenizer(books, 300), Validation(None, 1, 1)))
    assert [row["valid_loss"] for row, _ in seen] == [3.0, 2.0, 2.6, 2.5]
    assert [params is not None for _, params in seen] == [True, True, False, False]


def test_a_run_that_was_cut_off_goes_on_to_the_same_weights(corpus, tmp_path):
    books = read_books(corpus)
    model = train_tokenizer(books, TINY.vocab_size)
    valid = fit.make_validation([books[0][:40]], model, TINY.context)
    recipe, about = replace(RECIPE, patience=9), {"text": "this"}
    whole = list(fit.train(TINY, recipe, books, model, valid))
    begun = fit.train(TINY, recipe, books, model, valid, None, partial(resume.keep, tmp_path, about))
    first = [next(begun)[0] for _ in range(3)]  # of which two were kept: the third was cut off
    begun.close()
    like = jax.eval_shape(lambda: fit.begin(TINY, recipe, 0))
    found = resume.kept(tmp_path, about, like)
    assert found is not None
    assert found.rows == first[:2]
    rest = list(fit.train(TINY, recipe, books, model, valid, found))
    assert [row["step"] for row, _ in rest] == [30, 40]
    assert [row["valid_loss"] for row, _ in rest] == [row["valid_loss"] for row, _ in whole[2:]]
    jax.tree.map(np.testing.assert_array_equal, rest[-1][1], whole[-1][1])

    with pytest.raises(InputFileError, match=r"another run \(text differ"):
        resume.kept(tmp_path, {"text": "other"}, like)
    with pytest.raises(InputFileError, match="other shapes"):
        resume.kept(tmp_path, about, {"a": np.zeros(3)})
    resume.forget(tmp_path)
    assert resume.kept(tmp_path, about, like) is None


def test_sizes_are_defaults(corpus):
    args = train_small.parse_arguments(["--corpus", str(corpus), "--size", "subject", "--layers", "2"])
    assert (args.vocab, args.width, args.layers, args.kv_heads, args.context) == (8192, 512, 2, 2, 1024)
    bundled = train_small.parse_arguments(["--corpus", str(corpus)])
    assert (bundled.vocab, bundled.width, bundled.layers, bundled.lr) == (4096, 256, 8, 3e-3)


def test_an_interrupted_run_keeps_its_best_model(corpus, tmp_path, monkeypatch, capsys):
    def interrupted(config, recipe, *_):
        yield {"step": 10, "valid_loss": 5.0}, init_params(config, jax.random.key(0), jnp.float32)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_small, "train", interrupted)
    options = [f"--{name}={value}" for name, value in (SHAPE | QUICK).items()]
    assert main(["--corpus", str(corpus), "--out", str(tmp_path / "m"), "--results", str(tmp_path), *options]) == 130
    assert "interrupted; the best model so far is kept" in capsys.readouterr().err
    (file,) = tmp_path.glob("train_small-*.json")
    document = json.loads(file.read_text())
    assert document["complete"] is False
    assert document["rows"] == [{"step": 10, "valid_loss": 5.0}]
    assert jllm.load(tmp_path / "m").config.vocab_size == 320


def test_read_books_drops_what_is_no_prose(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(
        "I. ONE II. TWO III. Three IV. Four\nCHAPTER I. The Fox\n“Go—now,” he  said [to her].\n*   *   *\nShe ‘went’.\n"
        "\nSECOND BOOK\nA fox.\n"
    )
    assert read_books(file) == [["", "", '"Go--now," he said.', "", "She 'went'."], ["", "A fox."]]


def test_hold_out_takes_the_end_of_the_longest_book():
    books = [["a"] * 10, [str(i) for i in range(90)]]
    train, held = hold_out(books, fraction=0.05)
    assert held == [["85", "86", "87", "88", "89"]]
    assert train == [books[0], books[1][:85]]


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.sampled_from(["", "One.", "He said:", "Once upon a time.", "x" * 90]), max_size=30)), st.data()
)
def test_passages_are_the_paragraphs_in_order_and_break_at_openings(books, data):
    passages = cut_passages(books, np.random.default_rng(data.draw(st.integers(0, 99))), longest=200)
    assert "\n".join(passages).split("\n") == ([p for book in books for p in book if p] or [""])
    assert not any("\nOnce" in passage for passage in passages)


@settings(max_examples=50)
@given(st.lists(st.integers(2, 17), min_size=1, max_size=30), st.integers(0, 99))
def test_pack_keeps_every_passage_once(lengths, seed):
    rng = np.random.default_rng(seed)
    passages = [rng.integers(3, 99, n).astype(np.int32) for n in lengths]
    rows = pack(passages, 16, rng)
    found = []
    for tokens, targets, positions, segments in zip(rows.tokens, rows.targets, rows.positions, rows.segments):
        for segment in range(segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            assert positions[at].tolist() == list(range(len(at)))
            assert tokens[at][1:].tolist() == targets[at][:-1].tolist()
            found.append((*tokens[at].tolist(), int(targets[at][-1])))
        assert (targets[segments < 0] == -1).all()
    assert sorted(found) == sorted(tuple(p.tolist()) for p in passages)


def test_loss_of_a_packed_row_is_the_sum_of_its_passages():
    rng = np.random.default_rng(0)
    params = init_params(TINY, jax.random.key(0), jnp.float32)
    params = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, params)  # attention that looks at something
    passages = [rng.integers(3, 300, n).astype(np.int32) for n in (20, 9, 30)]
    packed, alone = (pack(group, 64, rng) for group in (passages, passages[:1]))
    assert packed.tokens.shape == (1, 64)

    def nats(rows):
        return float(jax.vmap(lambda row: row_nats(params, row, TINY))(jax.tree.map(jnp.asarray, rows)).sum())

    total = sum(nats(pack([passage], 64, rng)) for passage in passages)
    assert nats(packed) == pytest.approx(total, rel=1e-5)
    assert nats(alone) < 0.6 * total


def test_encode_marks_both_ends_and_repeats_under_a_seed(corpus):
    books = read_books(corpus)
    model = train_tokenizer(books, 320)
    texts = cut_passages(books, np.random.default_rng(0), longest=150)
    plain = encode(model, texts, 1000, dropout=0.0, seed=0)
    assert all(ids[0] == 1 and ids[-1] == 2 for ids in plain)
    assert max(map(len, encode(model, texts, 20, dropout=0.0, seed=0))) == 21
    once, again, other = (encode(model, texts, 1000, dropout=0.2, seed=seed) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(once, again))
    assert not all(np.array_equal(a, b) for a, b in zip(once, other))
    assert sum(map(len, once)) > 1.1 * sum(map(len, plain))


def test_dropped_units_are_columns_and_the_mean_stays():
    params = init_params(TINY, jax.random.key(0), jnp.float32)
    dropped = jax.jit(jax.vmap(lambda key: drop_units(params, key, 0.25)))(jax.random.split(jax.random.key(1), 500))
    ratio = np.asarray(dropped.layers[1].mlp.down / params.layers[1].mlp.down[None])
    assert np.allclose(ratio, ratio[:, :1])  # a unit is silent for all outputs
    assert np.allclose(np.sort(np.unique(np.round(ratio, 4))), [0, 1.3333])
    assert ratio[:, 0].mean() == pytest.approx(1, abs=0.02)
    assert np.array_equal(dropped.layers[0].attention.qkv[0], params.layers[0].attention.qkv)


def test_bundled_files_fit_together_and_are_small():
    files = {file.name: file.stat().st_size for file in BUNDLED.iterdir()}
    assert sum(files.values()) <= 16_000_000
    assert {"README.md", "loss.png", "config.json", "model.safetensors", "tokenizer.model"} <= files.keys()
    config, tokenizer = load_config(BUNDLED), load_tokenizer(BUNDLED)
    assert tokenizer.vocab_size == config.vocab_size == 4096
    assert tokenizer.bos_id == config.bos_id == 1
    assert tokenizer.eos_ids == config.eos_ids == (2,)
    assert {tensor.dtype for tensor in read_header(BUNDLED / "model.safetensors").values()} == {"BF16"}
    stated = json.loads((BUNDLED / "tokenizer_config.json").read_text())
    assert stated["model_max_length"] == config.context


@settings(max_examples=100)
@given(st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_bundled_tokenizer_round_trips(text):
    # "▁" is how SentencePiece writes a space, and the names of special tokens would be read as such
    tokenizer = load_tokenizer(BUNDLED)
    assert "<" in text or tokenizer.decode(tokenizer.encode(text)) == text


def test_bundled_model_knows_english():
    config, tokenizer = load_config(BUNDLED), load_tokenizer(BUNDLED)
    params = load_params(BUNDLED, config, "float32")

    def mean_nats(text):
        ids = tokenizer.encode(text)
        batch = Packed(*(jnp.asarray(leaf, jnp.int32) for leaf in (ids, range(len(ids)), [0] * len(ids))))
        logits = packed_logits(params, config, batch)
        return float(-jax.nn.log_softmax(logits[:-1])[jnp.arange(len(ids) - 1), jnp.asarray(ids[1:])].mean())

    told = "Once upon a time there lived a king who had three sons, and the youngest of them went out into the forest."
    words = told.split()
    random.Random(0).shuffle(words)
    assert mean_nats(told) < 3.0
    assert mean_nats(" ".join(words)) > mean_nats(told) + 2


def test_models_of_a_family_have_seeds_of_all_bits(corpus):
    books, seeds = read_books(corpus), (0, 2**32 - 1)
    model = train_tokenizer(books, 320)
    config, recipe = replace(TINY, vocab_size=320), replace(RECIPE, steps=fit.BLOCK)
    valid = fit.make_validation(books[1:], model, config.context)
    rows = list(train_heads.family(config, recipe, books, model, valid, [1], seeds))
    assert [row["seed"] for row in rows] == [*seeds]
    assert rows[0]["nats"] != rows[1]["nats"]
