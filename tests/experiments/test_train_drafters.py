"""Training drafters: their logits over whole texts are those that they draft by, losses fall, files load, and figures
are right for drafters whose acceptance is known."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")

from experiments import train_drafters  # noqa: E402
from experiments.train_drafters import main, one_a_row, sampling_of, text_nats  # noqa: E402
from experiments.training.data import pack  # noqa: E402
from experiments.training.drafters import (  # noqa: E402
    Known,
    accepted,
    by_depth,
    draft_passes,
    eagle_passes,
    medusa_passes,
    teach,
)
from experiments.training.drafters_fit import Recipe, fit  # noqa: E402
from experiments.training.drafters_texts import Continuation, continue_prompts, cut_prompts, know_rows  # noqa: E402
from jllm.errors import InputFileError  # noqa: E402
from jllm.files.drafters import load_drafter  # noqa: E402
from jllm.files.load import BUNDLED, load  # noqa: E402
from jllm.files.save import save  # noqa: E402
from jllm.model.backbone import head, packed_logits  # noqa: E402
from jllm.model.paged import Packed  # noqa: E402
from jllm.model.sampling import neutral_sampling, sample  # noqa: E402
from jllm.speculative.eagle import eagle_hidden, init_eagle  # noqa: E402
from jllm.speculative.medusa import head_logits, init_medusa  # noqa: E402
from jllm.speculative.tree import chain  # noqa: E402
from pallas_kernels.norm_quant import norm_quant  # noqa: E402
from tests.tiny import tiny_model  # noqa: E402

RECIPE = Recipe(steps=12, rows=4, length=32, lr=1e-2, weight_decay=0.0, decay=0.8, regression=1.0, seed=0)
MODEL = tiny_model(bos_id=1)
CONFIG, PARAMS = MODEL.config, MODEL.params
DEPTH = 3


def texts(count: int, seed: int = 0, longest: int = 30) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, CONFIG.vocab_size, rng.integers(8, longest)).astype(np.int32) for _ in range(count)]


@pytest.fixture(scope="module")
def known() -> Known:
    rows = pack(texts(16), 32, np.random.default_rng(0))
    return Known(rows, np.asarray(know_rows(PARAMS, rows, config=CONFIG)))


def weights_of(kind: str, key: int = 0):
    """Of a kind: its passes, and random weights."""
    if kind == "medusa":
        return partial(medusa_passes, config=CONFIG), init_medusa(
            CONFIG, jax.random.key(key), chain(DEPTH), "float32"
        ).heads
    if kind == "eagle":
        passes = partial(eagle_passes, config=CONFIG, depth=DEPTH)
        return passes, init_eagle(CONFIG, jax.random.key(key), chain(DEPTH), "float32").head
    draft = tiny_model(seed=1, num_layers=1)
    return partial(draft_passes, config=draft.config, depth=DEPTH), draft.params


@pytest.mark.parametrize("kind", ["draft", "medusa", "eagle"])
def test_each_loss_falls(kind, known):
    passes, weights = weights_of(kind)
    loss = partial(teach, passes=passes, config=CONFIG, decay=0.8, regression=1.0)
    taught, losses = fit(weights, PARAMS, known, loss, RECIPE, kind)
    assert losses[-1] < losses[0] - 0.1
    assert jax.tree.structure(taught) == jax.tree.structure(weights)
    again, same = fit(weights, PARAMS, known, loss, RECIPE, kind)
    assert same == losses


def test_the_loss_of_documents_falls(known):
    draft = tiny_model(seed=1, num_layers=1)
    loss = partial(text_nats, config=draft.config)
    _, losses = fit(draft.params, PARAMS, known.rows, loss, RECIPE, "draft")
    assert losses[-1] < losses[0] - 0.1


def test_a_drafter_that_is_the_target_has_its_entropy_for_a_loss(known):
    loss = partial(teach, config=CONFIG, decay=1.0, regression=0.0)
    found = float(loss(PARAMS, PARAMS, known, passes=partial(draft_passes, config=CONFIG)))
    total, count = 0.0, 0
    for r in range(len(known.rows.tokens)):
        row = jax.tree.map(lambda leaf: leaf[r], known.rows)  # noqa: B023
        logits = packed_logits(PARAMS, CONFIG, Packed(row.tokens, row.positions, row.segments))
        p = np.asarray(jax.nn.softmax(logits), np.float64)[row.segments >= 0]
        total, count = total - (p * np.log(p)).sum(), count + len(p)
    assert found == pytest.approx(total / count, rel=1e-4)


def alone(ids: np.ndarray):
    """A row with one text, and the target's hidden states of it."""
    rows = jax.tree.map(lambda leaf: leaf[0], one_a_row([ids], len(ids) + 2))
    batched = jax.tree.map(lambda leaf: leaf[None], rows)
    return Known(rows, know_rows(PARAMS, batched, config=CONFIG)[0])


def test_medusa_drafts_from_what_the_newest_token_was_drawn_from():
    ids = texts(1)[0]
    text = alone(ids)
    passes, heads = weights_of("medusa")
    found = passes(heads, PARAMS, text)
    normed = norm_quant(text.hidden, PARAMS.norm, eps=CONFIG.norm_eps)[0]
    for newest in range(1, len(ids) - DEPTH - 1):
        for m in range(DEPTH):
            want = head_logits(heads[m], normed[newest - 1 : newest], PARAMS)[0]
            assert found[m].valid[newest + m]
            np.testing.assert_allclose(found[m].logits[newest + m], want, rtol=1e-4, atol=1e-4)
        assert not found[0].valid[0]


def test_eagle_goes_on_from_its_own_states():
    """Each beginning alone, in a sequence that grows by its own states, gives what the passes over a whole text give;
    and text that is packed before it changes nothing."""
    first, ids = texts(2, seed=3, longest=14)
    passes, weights = weights_of("eagle")
    packed = pack([first, ids], 40, np.random.default_rng(0))
    row = jax.tree.map(lambda leaf: leaf[0], packed)
    hidden = know_rows(PARAMS, packed, config=CONFIG)[0]
    found = passes(weights, PARAMS, Known(row, hidden))
    at = np.flatnonzero((row.tokens == ids[0]) & (row.positions == 0) & (row.segments >= 0))
    begin = int(next(i for i in at if np.array_equal(row.tokens[i : i + len(ids) - 1], ids[:-1])))
    states = hidden[begin : begin + len(ids) - 1]
    n = len(ids) - 1
    batch = Packed(jnp.asarray(ids[:n]), jnp.arange(n, dtype=jnp.int32), jnp.zeros(n, jnp.int32))
    for newest in (0, 1, 4):
        before = np.full((n, CONFIG.hidden_size), 1e3, np.float32)  # later ones must not be seen
        before[: newest + 1] = np.concatenate([np.zeros((1, CONFIG.hidden_size)), states[:newest]])
        for m in range(DEPTH):
            f = eagle_hidden(weights, PARAMS, CONFIG, batch, jnp.asarray(before), None)[0]
            want = head(PARAMS, CONFIG, f)[newest + m]
            assert found[m].valid[begin + newest + m]
            np.testing.assert_allclose(found[m].logits[begin + newest + m], want, rtol=1e-4, atol=1e-4)
            before[newest + m + 1] = f[newest + m]


@pytest.fixture(scope="module")
def said() -> list[Continuation]:
    prompts = [np.array([1, *ids[:5]], np.int32) for ids in texts(4, seed=5)]
    return continue_prompts(MODEL, prompts, [0.0, 1.0, 0.0, 1.0], 20, 7)


def held(said: list[Continuation]):
    rows = one_a_row([text.tokens for text in said], 30)
    first = np.array([text.prompt for text in said], np.int32)
    return Known(rows, know_rows(PARAMS, rows, config=CONFIG)), sampling_of(said), first


def test_a_drafter_that_is_the_target_is_always_right(said):
    """So texts were drawn with the noise that drafts are drawn with."""
    passes = partial(draft_passes, config=CONFIG, depth=DEPTH)
    counts = np.asarray(accepted(PARAMS, PARAMS, *held(said), passes=passes, config=CONFIG, drafts=DEPTH))
    lengths = [len(text.tokens) - text.prompt for text in said]
    assert counts[:, 0].tolist() == [max(0, n - DEPTH) for n in lengths]
    assert (counts == counts[:, :1]).all()
    assert [row["tokens_a_step"] for row in by_depth(counts)] == [2, 3, 4]
    wrong = [replace(text, seed=text.seed + 1) for text in said]
    counts = np.asarray(accepted(PARAMS, PARAMS, *held(wrong), passes=passes, config=CONFIG, drafts=DEPTH))
    assert (counts[::2] == counts[::2, :1]).all()
    assert (counts[1::2, 1] < counts[1::2, 0]).all()


@pytest.mark.parametrize("kind", ["draft", "medusa"])
def test_acceptance_is_what_drafting_gives(kind, said):
    """Beginning by beginning and draft by draft, from the text as it is."""
    passes, weights = weights_of(kind)
    part = held(said)
    counts = np.asarray(accepted(weights, PARAMS, *part, passes=passes, config=CONFIG, drafts=DEPTH))
    for i, text in enumerate(said):
        want = np.zeros(1 + DEPTH, int)
        hidden = part[0].hidden[i]
        sampling = replace(
            neutral_sampling(1), temperature=np.float32([text.temperature]), seed=np.array([text.seed], np.uint32)
        )
        for newest in range(text.prompt, len(text.tokens) - DEPTH):
            want[0] += 1
            for m in range(1, DEPTH + 1):
                if kind == "draft":
                    n = newest + m
                    ids = np.pad(text.tokens[:n], (0, 30 - n))  # one length for one compilation
                    rows = Packed(*(jnp.asarray(x, jnp.int32) for x in (ids, range(30), [0] * 30)))
                    logits = packed_logits(weights, tiny_model(num_layers=1).config, rows)[n - 1 : n]
                else:
                    normed = norm_quant(hidden[newest - 1 : newest], PARAMS.norm, eps=CONFIG.norm_eps)[0]
                    logits = head_logits(weights[m - 1], normed, PARAMS)
                if int(sample(logits, sampling, jnp.array([newest + m], jnp.int32))[0][0]) != text.tokens[newest + m]:
                    break
                want[m] += 1
        assert counts[i].tolist() == want.tolist()


def test_figures_by_depth():
    first, second = by_depth(np.array([[10, 8, 4], [10, 4, 0]]))
    assert (first["acceptance"], second["acceptance"]) == (0.6, round(4 / 12, 4))
    assert (first["tokens_a_step"], second["tokens_a_step"]) == (1.6, 1.8)
    assert first["low"] == pytest.approx(0.4)
    assert first["high"] == pytest.approx(0.8)
    assert by_depth(np.zeros((2, 3), int))[0]["acceptance"] == 0


def test_texts_are_kept(tmp_path, said):
    prompts = [text.tokens[: text.prompt] for text in said]
    ask = partial(continue_prompts, MODEL, prompts, [0.0, 1.0, 0.0, 1.0], 20)
    kept = ask(7, tmp_path / "texts.jsonl")
    again = ask(7, tmp_path / "texts.jsonl")
    for one, two, three in zip(said, kept, again):
        assert one.tokens.tolist() == two.tokens.tolist() == three.tokens.tolist()
    with pytest.raises(InputFileError, match="another run"):
        ask(8, tmp_path / "texts.jsonl")
    (tmp_path / "texts.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(InputFileError, match="not a file of continuations"):
        ask(7, tmp_path / "texts.jsonl")


def test_prompts_leave_something_to_say():
    rng = np.random.default_rng(0)
    for ids, prompt in zip(texts(50), cut_prompts(texts(50), rng)):
        assert 1 <= len(prompt) < len(ids)
        assert prompt.tolist() == ids[: len(prompt)].tolist()


QUICK = {"steps": 4, "rows": 2, "length": 32, "texts": 12, "longest": 12, "held-texts": 3, "drafts": 3, "width": 32}


def test_the_command_leaves_drafters_that_load(tmp_path, capsys):
    model = tmp_path / "model"
    small = tiny_model(num_layers=1, bos_id=1)
    save(model, small.params, small.config)
    options = [f"--{name}={value}" for name, value in (QUICK | {"ffn": 32, "medusa-heads": 2, "passes": 2}).items()]
    command = ["--model", str(model), "--out", str(tmp_path / "out"), "--results", str(tmp_path), *options, "--json"]
    assert main(command) == 0, capsys.readouterr().err
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["complete"]
    told = {(row["drafter"], row["learned"], row["temperature"], row["depth"]) for row in document["rows"]}
    assert {("draft", "documents", 0.0, 1), ("draft", "distilled", 1.0, 3), ("medusa", "distilled", 0.0, 2)} <= told
    target = load(model)
    for kind, name in train_drafters.FILES.items():
        load_drafter(kind, tmp_path / "out" / name, target)
    assert main(command) == 2
    assert "is there already" in capsys.readouterr().err


def test_the_bundled_drafters_are_made_for_the_bundled_model():
    folder, target = BUNDLED / "drafters", load()
    assert sum(file.stat().st_size for file in folder.rglob("*")) < 8e6
    for kind, name in train_drafters.FILES.items():
        drafter = load_drafter(kind, folder / name, target)
        drafter.init(target.config, target.params.dtype, slots=1, num_pages=1, page_size=16, max_tokens=16)


def test_bad_options(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    for options, problem in (
        (["--width", "100"], "multiple of 64"),
        (["--drafts", "33"], "a chain has at most 32"),
        (["--medusa-heads", "33"], "a chain has at most 32"),
        (["--longest", "1025"], "the model's context is 1024"),
        (["--texts-folder", str(file)], "cannot be made a folder"),
        (["--valid", str(tmp_path / "none.txt")], "none.txt"),
    ):
        assert main([*options, "--out", str(tmp_path / "out"), "--results", str(tmp_path)]) == 2
        assert problem in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    assert "--medusa-heads" in capsys.readouterr().out
