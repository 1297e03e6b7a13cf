"""Offers generate() and stream(), the library's two one-call functions. Both run one Engine."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Unpack

from jllm.engine.checks import Array, Prompt, token_ids
from jllm.engine.engine import Engine
from jllm.engine.one_run import options_for_run
from jllm.engine.options import EngineKeywords
from jllm.engine.request import Completion, SamplingParams
from jllm.engine.tapped import Tokens
from jllm.errors import RequestError, counted
from jllm.model.model import Model
from jllm.programs.executables import jax_cache_is_on
from jllm.programs.folder import find_compile_cache


@dataclass(frozen=True)
class Piece:
    """Holds the new text of a completion that will not change any more."""

    prompt: int  # the prompt's position in the list
    sample: int  # the index of the sample among the prompt's n
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None  # set on a sample's last piece


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    inputs: Any = None,
    tokens: Tokens = "last",
    **options: Unpack[EngineKeywords],
) -> list[Completion]:
    """Completes prompts (text, or lists of token ids), batched continuously.

    `sampling` is one SamplingParams for all prompts, or a list with one for each. `inputs` are arrays that the hooks
    declare (Hooks.inputs), for all prompts, or a list with those of each. With the option `taps`, all completions have
    these values of their `tokens`, as Engine.submit does. `options` are the fields of EngineOptions
    (max_slots, page_size, num_pages, max_step_tokens, kv_cache, ...). Returns the completions in the order of the
    prompts, n for each.

    Compiles the steps before the first one runs, with a progress bar on a terminal. Compiled steps are saved in the
    command's cache (programs/folder.py), unless JAX has a cache of its own. executables=FOLDER saves them in that
    folder, and executables=None does not save them.
    """
    pieces = stream(model, prompts, sampling, inputs=inputs, tokens=tokens, **options)
    done = {(p.prompt, p.sample): p.completion for p in pieces if p.completion}
    return [done[key] for key in sorted(done)]


def stream(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    inputs: Any = None,
    tokens: Tokens = "last",
    **options: Unpack[EngineKeywords],
) -> Iterator[Piece]:
    """Completes prompts as generate does, but yields pieces as tokens come. Raises for bad arguments at the call,
    before the first piece."""
    prompts = as_prompts(prompts)
    if isinstance(sampling, SamplingParams):
        sampling = [sampling] * len(prompts)
    if not isinstance(sampling, Sequence) or not all(isinstance(s, SamplingParams) for s in sampling):
        raise RequestError(f"sampling must be SamplingParams, or a list of them, not {sampling!r}")
    if len(sampling) != len(prompts):
        raise RequestError(
            f"{len(sampling)} SamplingParams for {counted(len(prompts), 'prompt')}: give one for all, or one for each "
            "prompt"
        )
    if len(inputs := inputs if isinstance(inputs, list) else [inputs] * len(prompts)) != len(prompts):
        what = f"{counted(len(inputs), 'pytree')} of inputs for {counted(len(prompts), 'prompt')}"
        raise RequestError(f"{what}: give one for all, not in a list, or one for each prompt")
    requests = [(token_ids(prompt, model.tokenizer), params) for prompt, params in zip(prompts, sampling)]
    if "executables" not in options:
        options["executables"] = _compile_cache()
    engine = Engine(model, **options_for_run([(len(ids), params) for ids, params in requests], options))
    try:
        for ids, params in requests:
            engine.check(ids, params)
        own = [engine.check_inputs(one) for one in inputs]
        taps = options.get("taps") or ()
        if requests:
            engine.compile_ahead(sampling)
        asked = enumerate(zip(requests, own))
        index = {engine.submit(*one, inputs=given, taps=taps, tokens=tokens): i for i, (one, given) in asked}
    except BaseException:
        engine.close()
        raise
    return _pieces(engine, index)


def _compile_cache() -> Path | None:
    """Returns the default folder of compiled steps. It is None if JAX has its own cache, or if no folder is
    writable."""
    return None if jax_cache_is_on() else find_compile_cache()


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns one prompt or several as a list. A list of integers is one prompt, and so is an array with one axis."""
    if isinstance(prompts, str) or (isinstance(prompts, Array) and prompts.ndim < 2):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be text, token ids, or a list of these, not {prompts!r}")
    several: list = list(prompts)
    return [several] if several and isinstance(several[0], Integral) else several


def _pieces(engine: Engine, index: dict[int, int]) -> Iterator[Piece]:
    try:
        for event in engine.run():
            yield Piece(index[event.id], event.sample, event.text, event.token_ids, event.completion)
    finally:  # also if the caller stops early
        engine.close()
