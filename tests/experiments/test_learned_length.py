"""The learned length predictor: what it sees, what it answers, that it learns, and whom it serves."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("optax")

import jllm
from experiments import length_data
from experiments import train_length_predictor as train
from experiments.length_data import (
    LONGEST,
    SHORTEST,
    Request,
    Text,
    about_texts,
    cut_requests,
    generate_texts,
    read_texts,
)
from experiments.policies import LEARNED, learned_by
from experiments.training import length_fit
from experiments.training.learned_length import (
    ARRAYS,
    BAG,
    DENSE,
    LAST,
    PLACES,
    STOPS,
    Learned,
    LengthPredictorError,
    corrected,
    features,
    fingerprint,
    load_learned,
    save_learned,
)
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import InputFileError, JllmError, OutputError
from jllm.kv_policies.extent import Extent
from jllm.kv_policies.length import Predictor
from jllm.step.buckets import Bucket
from pallas_kernels.one_writer import open_alone
from tests.tiny import greedy, tiny_model

EDGES = np.array([1, 2, 4, 8, 16])
SLOTS = 16  # of all engines here, so that they compile the same steps


def arrays(shares, levels=(), width: int = 3) -> dict[str, np.ndarray]:
    """A network that says the same of every prompt."""
    sizes = {"bag": (BAG, width), "last": (PLACES * LAST + 1, width), "stops": (STOPS, width), "dense": (DENSE, width)}
    zeros = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    rest = {
        "bias": np.zeros(width),
        "out": np.zeros((width, len(EDGES))),
        "out_bias": np.log(np.asarray(shares, float)),
    }
    return zeros | rest | {"edges": EDGES, "levels": np.asarray(levels, float)}


def asked(learned: Learned, quantile: float, produced: int = 0, longest: int = 100) -> int:
    return learned.predict((1, 2, 3), SamplingParams(max_new_tokens=longest), quantile, produced)


def test_quantiles_of_a_known_distribution():
    learned = Learned(arrays([0.1, 0.2, 0.4, 0.2, 0.1]))
    assert isinstance(learned, Predictor)
    np.testing.assert_allclose(learned.distribution((5,)), [0.1, 0.3, 0.7, 0.9, 1.0])
    # a bin's share counts evenly over its lengths: half of it is half-way between the edges
    assert [asked(learned, q) for q in (0.05, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9)] == [1, 1, 2, 3, 4, 6, 8]
    assert asked(learned, 0.95) == 100  # beyond the last closed bin only the request's own limit is known
    assert asked(learned, 0.9, longest=5) == 5


def test_what_is_produced_already_is_known():
    learned = Learned(arrays([0.1, 0.2, 0.4, 0.2, 0.1]))
    # of the 0.3 that remain past 4, half is 0.85 of all: three quarters of the bin 5 .. 8
    assert asked(learned, 0.5, produced=4) == 7
    assert asked(learned, 0.01, produced=4) == 5
    assert asked(learned, 0.9, produced=50) == 100
    for produced in range(1, 30):
        assert produced < asked(learned, 0.01, produced) <= asked(learned, 0.5, produced) <= 100


def test_levels_correct_the_shares():
    below = np.array([0.2, 0.5, 0.9, 1.0])
    np.testing.assert_allclose(corrected(below, np.zeros(0)), below)
    # true lengths were all in the upper half of what the network said
    np.testing.assert_allclose(corrected(below, np.linspace(0.5, 1, 101)[1:-1]), [0, 0, 0.8, 1.0], atol=0.01)
    certain = Learned(arrays([0.1, 0.2, 0.4, 0.2, 0.1], levels=[0.85] * 99))
    assert asked(certain, 0.5) == 6  # so near to all lies between 5 and 8


def test_features_by_hand():
    x = features((7, 7, 9), ("\n",))
    assert len(x.bag) == 2
    assert sorted(x.counts / x.counts.min()) == pytest.approx([1, np.log(3) / np.log(2)], rel=1e-3)
    assert (x.last[1] - LAST) % LAST == (x.last[2] - 2 * LAST) % LAST  # both 7
    assert x.last[0] < LAST
    assert x.last[3] == PLACES * LAST  # too short
    assert len(x.stops) == 1
    assert x.dense[3] == 1
    assert features((7,), ()).dense[3] == 0
    assert not np.array_equal(features((7, 9), ()).last, features((9, 7), ()).last)


def test_a_file_is_good_for_its_model_alone(tmp_path):
    model, path = tiny_model(), tmp_path / "length.safetensors"
    save_learned(path, arrays([0.1, 0.2, 0.4, 0.2, 0.1]), model, {"texts": 3})
    assert asked(load_learned(path, model), 0.5) == 3
    with pytest.raises(LengthPredictorError, match="made for a vocabulary of 97 tokens; this model has 98"):
        load_learned(path, tiny_model(vocab_size=98))
    with pytest.raises(LengthPredictorError, match="made for another model of the same vocabulary size"):
        load_learned(path, tiny_model(seed=1))
    assert fingerprint(tiny_model("bfloat16")) == fingerprint(tiny_model("bfloat16")) != fingerprint(tiny_model())
    for content, message in ((b"", "cannot be read"), (path.read_bytes()[:-40], "cannot be read")):
        path.write_bytes(content)
        with pytest.raises(LengthPredictorError, match=message):
            load_learned(path, model)
    garbled = arrays([0.1, 0.2, 0.4, 0.2, 0.1])
    save_learned(path, {**garbled, "out": garbled["out"][:, 1:]}, model, {})
    with pytest.raises(LengthPredictorError, match=r"out is of shape \[\d+, 4\], not \[\d+, 5\]"):
        load_learned(path, model)
    with pytest.raises(LengthPredictorError, match="cannot be written"):
        save_learned(tmp_path / "no" / "where", arrays([1] * 5), model, {})
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1)}, path)
    with pytest.raises(LengthPredictorError, match="not a length predictor"):
        load_learned(path, model)


def test_the_error_that_the_library_had_is_named():
    with pytest.raises(ImportError, match="LengthPredictorError is gone: experiments.training.learned_length has it"):
        _ = jllm.LengthPredictorError


def test_the_engine_takes_one_as_an_object(tmp_path):
    model, path = tiny_model(bos_id=1), tmp_path / "length.safetensors"
    save_learned(path, arrays([0.1, 0.2, 0.4, 0.2, 0.1]), model, {})
    buckets = (Bucket(SLOTS, 0, 0), Bucket(SLOTS, SLOTS, SLOTS))
    options = {"max_slots": SLOTS, "page_size": 32, "max_step_tokens": 2 * SLOTS, "buckets": buckets}
    plain, counting = (
        Engine(model, **options, **more)
        for more in ({}, {"kv_policy": Extent(learned_by(f"{LEARNED}{path}", model), quantile=0.5)})
    )
    said = []
    for engine in (plain, counting):
        ids = [engine.submit([3, 4, 5 + i], greedy(12)) for i in range(3)]
        done = {event.id: event.completion for event in engine.run() if event.completion}
        said.append([done[i].token_ids for i in ids])
    assert said[0] == said[1]


def test_requests_are_cut_wherever_it_is_not_known_what_follows():
    texts = [Text(i, tuple(range(10, 10 + n)), ended=n != 300) for i, n in enumerate((1, 40, 300))]
    requests = cut_requests(texts, 1, frozenset({30}), 200, np.random.default_rng(0))
    assert requests == cut_requests(texts, 1, frozenset({30}), 200, np.random.default_rng(0))
    for r in requests:
        place = len(r.prompt) - 1
        assert r.prompt == (1, *range(10, 10 + place))
        assert SHORTEST <= place <= LONGEST
        text = next(t for t in texts if len(t.tokens) >= place and (place + r.output) in (len(t.tokens) + t.ended, 21))
        if r.stop and place <= 20:
            assert r.output == 21 - place  # the line break is the 21st token
        else:
            assert (r.output, r.ended) == (len(text.tokens) - place + text.ended, text.ended)
    assert {bool(r.stop) for r in requests} == {True, False}
    assert any(not r.ended for r in requests)


@pytest.fixture(scope="module")
def lessons():
    """Requests whose last token says how long they get: 12 tokens or 90, give or take."""
    rng = np.random.default_rng(0)

    def some(count):
        for _ in range(count):
            long = bool(rng.integers(2))
            prompt = tuple(rng.integers(3, 40, rng.integers(2, 30)).tolist())
            yield Request((*prompt, 50 + long), (), int((90 if long else 12) * rng.uniform(0.6, 1.6)))

    return [list(some(n)) for n in (400, 400, 400, 200)]


@pytest.fixture(scope="module")
def taught(lessons):
    edges = length_fit.make_edges(100)
    recipe = length_fit.Recipe(
        width=16, steps=300, rows=128, lr=1e-2, weight_decay=0.01, dropout=0.1, table_rate=1.0, seed=0
    )
    found, steps = length_fit.fit(lessons[:3], edges, recipe)
    assert steps > 0
    return found


def test_what_a_prompt_tells_is_learned(taught, lessons):
    assert set(taught) == set(ARRAYS)
    (row, story) = train.figures(Learned(taught), lessons[3], train.kinds(lessons[0]))
    assert (row["kind"], story["kind"]) == ("all", "story")
    assert row["nats"] < row["blind_nats"] - 0.4  # log 2 is whether it is long
    assert row["coverage_90"] > 0.84
    assert 0.35 < row["coverage_50"] < row["coverage_90"]
    assert row["over_90"] < row["blind_over_90"] - 0.5


def test_a_stored_predictor_answers_the_same(taught, lessons, tmp_path):
    model, path = tiny_model(), tmp_path / "length.safetensors"
    save_learned(path, taught, model, {})
    before, after = Learned(taught), load_learned(path, model)
    for request in lessons[3][:50]:
        below = before.distribution(request.prompt)
        np.testing.assert_allclose(after.distribution(request.prompt), below, atol=5e-3)
    assert path.stat().st_size < 200_000


def test_seeds_are_told_as_ranges():
    assert train.ranges([0, 1, 2, 7, 9, 10]) == "0-2, 7, 9-10"
    assert train.ranges([]) == ""


def test_cut_off_texts_count_as_at_least_so_long():
    edges = length_fit.make_edges(100)
    cut = [Request((4, 5, 6), (), 40, ended=False)] * 200
    ended = [Request((4, 5, 6), (), 10)] * 200
    recipe = length_fit.Recipe(
        width=4, steps=100, rows=64, lr=5e-2, weight_decay=0.0, dropout=0.0, table_rate=1.0, seed=0
    )
    part = length_fit.examples(cut + ended, edges)
    weights, _ = length_fit.train(part, len(edges), recipe, part)
    below = Learned({**weights, "edges": edges, "levels": np.zeros(0)}).distribution((4, 5, 6))
    at = {n: float(np.interp(n, edges, below)) for n in (8, 12, 37)}
    assert at[8] < 0.05
    assert abs(at[12] - 0.5) < 0.05
    assert abs(at[37] - 0.5) < 0.05


class Letters:
    """A tokenizer as far as this needs one: token 3 is a line break."""

    vocab_size = 97

    def decode(self, ids):
        return "".join("\n" if i == 3 else "x" for i in ids)

    def stream_decoder(self, prompt_ids=()):
        return self

    def push(self, id):
        return self.decode([id])

    def finish(self):
        return ""


@pytest.mark.parametrize("size", [56], ids=str)
def test_from_a_model_to_a_file(size, tmp_path, capsys, monkeypatch):
    model = replace(tiny_model(bos_id=1), tokenizer=Letters())
    monkeypatch.setattr(train, "load", lambda path: model)
    monkeypatch.setattr(length_data, "SLOTS", SLOTS)
    out, workload = tmp_path / "length.safetensors", tmp_path / "stories.jsonl"
    options = {
        "out": out,
        "workload": workload,
        "results": tmp_path,
        "texts": size,
        "longest": 30,
        "steps": 50,
        "cuts": 60,
    }
    command = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert train.main([*command, "--rows", "32", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["complete"]
    assert [row["kind"] for row in document["rows"]] == ["all", "story", "paragraph"]
    assert document["model"] == fingerprint(model)
    assert isinstance(load_learned(out, model), Predictor)
    lines = [json.loads(line) for line in workload.read_text().splitlines()]
    assert {tuple(line["stop"]) for line in lines} == {(), ("\n",)}
    texts = tmp_path / "length.safetensors.texts.jsonl"
    about = about_texts(model, 30)
    first = read_texts(texts, about)
    assert sorted(text.seed for text in first) == list(range(size))
    lines = texts.read_text().splitlines(keepends=True)
    texts.write_text("".join(lines[:-2]) + lines[-2][:20])  # as an interrupted run leaves it
    assert generate_texts(model, size, 30, texts) == sorted(first, key=lambda text: text.seed)
    assert len(read_texts(texts, about)) == size
    moved = replace(model, params=replace(model.params, embed=model.params.embed.at[0, 0].add(1e-3)))
    with pytest.raises(InputFileError, match=r"has texts of another run \(weights differ\): name another file"):
        generate_texts(moved, size, 30, texts)
    with (
        open_alone(texts),
        pytest.raises(OutputError, match="another process is writing .*, or name another"),
    ):
        generate_texts(model, size, 30, texts)


def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch):
    model = tiny_model(bos_id=1)
    monkeypatch.setattr(train, "load", lambda path: model)
    command = ["--results", str(tmp_path), "--out", str(tmp_path / "x")]
    assert train.main(command) == 2
    assert "needs its tokenizer" in capsys.readouterr().err
    (tmp_path / "t.jsonl").write_text("{}\nx\n")
    with pytest.raises(JllmError, match="not a file of generated texts"):
        read_texts(tmp_path / "t.jsonl", {})
    for wrong in (["--texts", "0"], ["--dropout", "1"]):
        with pytest.raises(SystemExit):
            train.parse_args(wrong)
