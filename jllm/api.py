"""generate() and stream(): the library's two one-call entrances, both over one Engine."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Unpack

from jllm.engine.checks import Array, Prompt, token_ids
from jllm.engine.engine import Engine
from jllm.engine.one_run import options_for_run
from jllm.engine.options import EngineKeywords
from jllm.engine.request import Completion, SamplingParams
from jllm.errors import RequestError, counted
from jllm.model.model import Model
from jllm.programs.executables import jax_cache_is_on
from jllm.programs.folder import find_compile_cache


@dataclass(frozen=True)
class Piece:
    """What has become certain of one completion since its last piece."""

    prompt: int  # which prompt, by position
    sample: int  # which of its n samples
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None  # set on a sample's last piece


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    **options: Unpack[EngineKeywords],
) -> list[Completion]:
    """Completes prompts (text, or lists of token ids), batched continuously.

    `sampling` is one SamplingParams or one a prompt; options are those of EngineOptions (max_slots, page_size,
    num_pages, max_step_tokens, kv_cache, ...). Completions come in the order of the prompts, n for each.

    Steps are compiled before the first of them runs, with progress on a terminal, and kept where the command keeps its
    own (programs/folder.py) for the next time, unless JAX keeps them itself; executables=FOLDER keeps them there, and
    executables=None nowhere.
    """
    done = {(p.prompt, p.sample): p.completion for p in stream(model, prompts, sampling, **options) if p.completion}
    return [done[key] for key in sorted(done)]


def stream(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    **options: Unpack[EngineKeywords],
) -> Iterator[Piece]:
    """Like generate, but yields pieces as tokens come. Bad arguments raise here, not at the first piece."""
    prompts = as_prompts(prompts)
    if isinstance(sampling, SamplingParams):
        sampling = [sampling] * len(prompts)
    if not isinstance(sampling, Sequence) or not all(isinstance(s, SamplingParams) for s in sampling):
        raise RequestError(f"sampling must be SamplingParams, or a list of them, not {sampling!r}")
    if len(sampling) != len(prompts):
        raise RequestError(
            f"{len(sampling)} SamplingParams for {counted(len(prompts), 'prompt')}: give one, or one a prompt"
        )
    requests = [(token_ids(prompt, model.tokenizer), params) for prompt, params in zip(prompts, sampling)]
    if "executables" not in options:
        options["executables"] = _compile_cache()
    engine = Engine(model, **options_for_run([(len(ids), params) for ids, params in requests], options))
    try:
        for ids, params in requests:
            engine.check(ids, params)
        if requests:
            engine.compile_ahead(sampling)
        index = {engine.submit(ids, params): i for i, (ids, params) in enumerate(requests)}
    except BaseException:
        engine.close()
        raise
    return _pieces(engine, index)


def _compile_cache() -> Path | None:
    """Where steps are kept by default; nowhere if JAX keeps them itself, or files could not."""
    return None if jax_cache_is_on() else find_compile_cache()


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns one prompt or several, as a list. A list of integers is one prompt, and so is an array with one axis."""
    if isinstance(prompts, str) or (isinstance(prompts, Array) and prompts.ndim < 2):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be text, token ids, or a list of such, not {prompts!r}")
    several: list = list(prompts)
    return [several] if several and isinstance(several[0], Integral) else several


def _pieces(engine: Engine, index: dict[int, int]) -> Iterator[Piece]:
    try:
        for event in engine.run():
            yield Piece(index[event.id], event.sample, event.text, event.token_ids, event.completion)
    finally:  # also when the caller stops half-way
        engine.close()
