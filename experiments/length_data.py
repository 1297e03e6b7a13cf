"""What a length predictor learns from: whole texts that a model made and ended itself, and requests cut out of them.

A text that was sampled token by token is, behind any cut, a sample of what the model says after the part before it: so
one text gives a request (prompt, number of tokens that follow) wherever it is cut, as long as the place doesn't depend
on what comes after it. Requests are of two kinds, as clients send them: a story to its end token, and a paragraph,
which stops at the first line break.
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
    ended: bool  # by itself; else it was cut off


@dataclass(frozen=True)
class Request:
    """A prompt, the strings that stop it, and the tokens that follow, the last one included."""

    prompt: tuple[int, ...]
    stop: tuple[str, ...]
    output: int
    ended: bool = True  # else it has at least `output` tokens


def generate_texts(model: Model, count: int, longest: int, path: Path) -> list[Text]:
    """Texts of seeds 0 .. count-1, at temperature 1 from the begin token, and those of other seeds that `path` has.
    What it has is not made again, and new ones are appended to it as they end, so that an interrupted run goes on: it
    must, since the texts that are missing by then are long ones. Raises InputFileError for a file of another model,
    OutputError for one that cannot be written or that another process writes, RequestError for a model without a begin
    token."""
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
    """Returns what decides texts, besides their seeds."""
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
    """Without a last line that was cut off. Raises InputFileError where the file is not of this model and length."""
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
    """Returns ids of tokens with a line break in their text."""
    return frozenset(i for i in range(tokenizer.vocab_size) if LINE in tokenizer.decode([i]))


def cut_requests(
    texts: Sequence[Text], begin: int, lines: frozenset[int], cuts: int, rng: np.random.Generator
) -> list[Request]:
    """Returns requests from each text at `cuts` places, of both kinds in turn. Places are drawn log-uniformly from
    SHORTEST .. LONGEST tokens whatever the text; those behind its end are dropped."""
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
