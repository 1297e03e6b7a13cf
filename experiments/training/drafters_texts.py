"""Makes the texts of drafters: documents, the target's continuations of their beginnings, and its hidden states of
both."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments.training.data import Rows, cut_passages, pack, read_books
from experiments.training.drafters import Known, know
from experiments.training.drafters_fit import Recipe
from jllm.api import stream
from jllm.config import LlamaConfig
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError, InputFileError, OutputError
from jllm.files.fingerprint import of_params
from jllm.files.run_identity import differing, digest, of_machine
from jllm.model.model import Model
from jllm.model.params import Params

SLOTS = 64
SHORTEST, LONGEST = 4, 128  # tokens of a prompt
BLOCK = 8  # rows whose hidden states are computed at once
STORED = jnp.bfloat16  # dtype of kept hidden states
TEXTS = ("documents", "continuations", "held")  # names of files


@dataclass(frozen=True)
class Continuation:
    """A prompt and the model's continuation, drawn with this temperature and seed."""

    tokens: np.ndarray  # i32[n], the prompt's first
    prompt: int  # tokens of the prompt
    temperature: float
    seed: int


@dataclass(frozen=True)
class Texts:
    """The texts to learn from and to measure with."""

    documents: Rows  # [N, L]
    known: Known  # [N, L], the target's texts and some documents
    held: list[Continuation]


def make_texts(model: Model, args: argparse.Namespace, recipe: Recipe) -> Texts:
    """Returns the texts: reads or generates the documents, and lets the model continue their beginnings."""
    files = (None, None, None) if args.texts_folder is None else [args.texts_folder / f"{n}.jsonl" for n in TEXTS]
    rng, length = np.random.default_rng(recipe.seed), recipe.length
    if args.valid:
        read_books(args.valid)  # a bad text fails before the model generates
    if args.corpus:
        documents = read_documents(model, args.corpus, rng, length)
    else:
        begin = [np.array([_begin(model)], np.int32)] * args.texts
        said = continue_prompts(model, begin, [1.0] * len(begin), args.longest, recipe.seed + 2 * args.texts, files[0])
        documents = [text.tokens[: length + 1] for text in said]
    held = read_documents(model, args.valid, rng, length) if args.valid else documents[: max(2, len(documents) // 10)]
    documents = documents if args.valid else documents[len(held) :]
    if not documents:
        raise ConfigError("too few documents to learn from: give more text, or raise --texts")
    some = [documents[i] for i in rng.permutation(len(documents))[: args.texts]]
    prompts = cut_prompts(some, rng)
    said = continue_prompts(model, prompts, _both(len(some)), args.longest, recipe.seed, files[1])
    known = know_texts(model, pack([*(text.tokens[: length + 1] for text in said), *some], length, rng))
    shown = [ids for ids in cut_prompts(held[: args.held_texts], rng) for _ in range(2)]
    later = recipe.seed + args.texts  # seeds that no training text has
    return Texts(
        pack(documents, length, rng),
        known,
        continue_prompts(model, shown, _both(len(shown)), args.longest, later, files[2]),
    )


def _both(count: int) -> list[float]:
    """Returns temperatures 0 and 1 in turn."""
    return [float(i % 2) for i in range(count)]


def _begin(model: Model) -> int:
    bos = model.config.bos_id
    first = bos if bos is not None else next(iter(model.eos_ids), None)
    if first is None:
        raise ConfigError("the model has neither BOS nor EOS to begin a text with: give --corpus")
    return first


def read_documents(model: Model, file: str, rng: np.random.Generator, length: int) -> list[np.ndarray]:
    """Returns token ids of a text's passages in random order, each cut at `length` + 1."""
    if model.tokenizer is None:
        raise ConfigError(f"{file}: the model has no tokenizer to read it with: leave --corpus and --valid out")
    passages = cut_passages(read_books(file), rng, longest=3 * length)
    ids = [[*model.tokenizer.encode(text), *model.eos_ids[:1]][: length + 1] for text in passages]
    return [np.asarray(ids[i], np.int32) for i in rng.permutation(len(ids))]


@partial(jax.jit, static_argnames="config")
def know_rows(params: Params, rows: Rows, *, config: LlamaConfig) -> jax.Array:
    """Returns hidden states [B, L, E]."""
    return jax.lax.map(lambda row: know(params, row, config=config), rows)


def know_texts(model: Model, rows: Rows) -> Known:
    """Returns rows with the target's hidden states, kept on the host as STORED."""
    hidden = []
    for start in tqdm(range(0, len(rows.tokens), BLOCK), desc="hidden states", unit_scale=BLOCK, unit="row"):
        some = jax.tree.map(lambda leaf: leaf[start : start + BLOCK], rows)  # noqa: B023
        hidden.append(np.asarray(know_rows(model.params, some, config=model.config).astype(STORED)))
    return Known(rows, np.concatenate(hidden))


def cut_prompts(documents: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Returns the beginning of each document, of a length drawn log-uniformly, at most all but its last token."""
    lengths = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST + 1), len(documents))).astype(int)
    return [ids[: max(1, min(n, len(ids) - 1))] for ids, n in zip(documents, lengths)]


def continue_prompts(
    model: Model,
    prompts: Sequence[np.ndarray],
    temperatures: Sequence[float],
    length: int,
    seed: int,
    file: Path | None = None,
) -> list[Continuation]:
    """Returns at most `length` new tokens for each prompt at its temperature, with seeds from `seed` on. An end token
    is kept if the model drew it. A `file` stores them; an existing one is read. Raises InputFileError for a file of
    other prompts or another model, and OutputError if it cannot be written."""
    asked = [(temperature, seed + i) for i, temperature in enumerate(temperatures)]
    about = {"length": length, "asked": digest([repr(asked).encode()]), "weights": of_params(model.params)}
    about |= of_machine() | {"prompts": digest(np.asarray(prompt, np.int32).tobytes() for prompt in prompts)}
    if file is not None and file.exists():
        said = _read(file, about, len(prompts))
    else:
        sampling = [SamplingParams(temperature=t, seed=s, max_new_tokens=length) for t, s in asked]
        said = [()] * len(prompts)
        end = model.eos_ids if len(model.eos_ids) == 1 else ()  # among several, the drawn one is unknown
        with tqdm(total=len(prompts), desc="continuations", unit="text") as bar:
            for piece in stream(model, [ids.tolist() for ids in prompts], sampling, max_slots=SLOTS):
                if (done := piece.completion) is not None:
                    said[piece.prompt] = done.token_ids + (end if done.finish_reason == "stop" else ())
                    bar.update()
        if file is not None:
            _write(file, about, said)
    return [
        Continuation(np.concatenate([prompt, np.asarray(new, np.int32)]), len(prompt), *how)
        for prompt, new, how in zip(prompts, said, asked)
    ]


def _write(file: Path, about: dict[str, object], said: list[tuple[int, ...]]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in (about, *said)), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror}") from None


def _read(file: Path, about: dict[str, object], count: int) -> list[tuple[int, ...]]:
    try:
        told, *said = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        if names := differing(told, about):
            raise InputFileError(f"{file}: has texts of another run ({', '.join(names[:3])} differ): name another file")
        if len(said) != count:
            raise InputFileError(f"{file}: has {len(said)} of {count} texts: remove it")
        return [tuple(map(int, line)) for line in said]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(f"{file}: not a file of continuations: {error}") from None
