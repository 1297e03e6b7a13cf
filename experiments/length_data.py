"""Makes data for length predictors: whole texts that a model ended itself, and requests cut from them.

A text sampled token by token is, after any cut, a sample of the model's continuation of the part before it. So one text
gives a request (prompt, number of following tokens) at every cut, if its place does not depend on the later tokens.
Requests have two kinds, like clients': a story to its end token, and a paragraph that stops at the first line break.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import InputFileError, OutputError, RequestError
from jllm.files.fingerprint import of_params
from jllm.files.run_identity import differing, digest, of_machine
from jllm.files.tokenizer import Tokenizer
from jllm.model.model import Model
from jllm.step.buckets import Bucket
from pallas_kernels.one_writer import open_alone

SLOTS = 64
LINE = "\n"
SHORTEST, LONGEST = 2, 256  # tokens of a prompt


@dataclass(frozen=True)
class Text:
    """One sample of a model, without the begin token."""

    seed: int
    tokens: tuple[int, ...]  # without the end token
    ended: bool  # False: it was cut off


@dataclass(frozen=True)
class Request:
    """A prompt, the strings that stop it, and the tokens that follow, with the last one."""

    prompt: tuple[int, ...]
    stop: tuple[str, ...]
    output: int
    ended: bool = True  # False: it has at least `output` tokens


def generate_texts(model: Model, count: int, longest: int, path: Path) -> list[Text]:
    """Returns the texts of seeds 0 .. count-1, and all other texts in `path`. They are drawn at temperature 1 from the
    begin token. Existing texts are kept, and new ones are appended as they end. So an interrupted run resumes; it must,
    since the missing texts are the long ones.

    Raises InputFileError for another model's file. Raises OutputError if it cannot be written, or another process
    writes it. Raises RequestError for a model without a begin token.
    """
    if model.config.bos_id is None:
        raise RequestError("texts are sampled from the begin token, and this model has none")
    try:
        file = open_alone(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None
    if file is None:
        raise OutputError(f"another process is writing {path}: wait for its end, or name another --texts-file")
    with file:
        about = about_texts(model, longest)
        if not path.stat().st_size:
            file.write(json.dumps(about).encode() + b"\n")
        found = {text.seed: text for text in read_texts(path, about)}
        file.truncate(path.read_bytes().rfind(b"\n") + 1)  # a line that was cut off
        missing = [seed for seed in range(count) if seed not in found]
        with tqdm(total=len(missing), unit="text", delay=2) as bar:
            for text in _generate(model, missing, longest) if missing else ():
                found[text.seed] = text
                line = json.dumps({"seed": text.seed, "ended": text.ended, "tokens": text.tokens})
                file.write(line.encode() + b"\n")
                bar.update()
    return [found[seed] for seed in sorted(found)]


def about_texts(model: Model, longest: int) -> dict[str, object]:
    """Returns everything that decides texts, except their seeds."""
    config = digest([repr(model.config).encode(), str(model.params.dtype).encode()])
    return {"longest": longest, "config": config, "weights": of_params(model.params)} | of_machine()


def _generate(model: Model, seeds: Sequence[int], longest: int) -> Iterator[Text]:
    buckets = (Bucket(SLOTS, 0, 0), Bucket(SLOTS, SLOTS, SLOTS))  # prompts have one token
    engine = Engine(model, max_slots=SLOTS, page_size=32, buckets=buckets, max_step_tokens=2 * SLOTS)
    longest = min(longest, model.config.context - 1)
    ids = {}
    for seed in seeds:
        params = SamplingParams(temperature=1.0, max_new_tokens=longest, seed=seed)
        ids[engine.submit([model.config.bos_id or 0], params)] = seed
    for event in engine.run():
        if event.completion is not None:
            done = event.completion
            yield Text(ids[event.id], done.token_ids, done.finish_reason == "stop")


def read_texts(path: Path, about: dict[str, object]) -> list[Text]:
    """Returns the texts in a file, without an incomplete last line. Raises InputFileError for another model or
    length."""
    try:
        head, *lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        told = dict(json.loads(head))
        rows = [json.loads(line) for line in lines]
        texts = [Text(row["seed"], tuple(row["tokens"]), row["ended"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputFileError(f"{path}: not a file of generated texts: {error}") from None
    if names := differing(told, about):
        raise InputFileError(f"{path}: has texts of another run ({', '.join(names[:3])} differ): name another file")
    return texts


def line_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the ids of tokens with a line break in their text."""
    return frozenset(i for i in range(tokenizer.vocab_size) if LINE in tokenizer.decode([i]))


def cut_requests(
    texts: Sequence[Text], begin: int, lines: frozenset[int], cuts: int, rng: np.random.Generator
) -> list[Request]:
    """Returns requests from each text at `cuts` places, of both kinds in turn. Places are drawn log-uniformly from the
    allowed prompt lengths, without looking at the text. Places after its end are dropped."""
    requests = []
    for text in texts:
        places = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST + 1), cuts)).astype(int).tolist()
        for i, place in enumerate(places):
            rest = text.tokens[place:]
            if place > len(text.tokens) or not (rest or text.ended):
                continue
            prompt = (begin, *text.tokens[:place])
            line = next((j for j, token in enumerate(rest) if token in lines), None) if i % 2 else None
            whole = len(rest) + text.ended
            stop = (LINE,) if i % 2 else ()
            requests.append(
                Request(prompt, stop, whole, text.ended) if line is None else Request(prompt, stop, line + 1)
            )
    return requests
