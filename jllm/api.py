"""generate() and stream(): the library's two one-call entrances, both over one Engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jllm.engine.loop import Engine
from jllm.engine.request import Completion, SamplingParams
from jllm.errors import RequestError
from jllm.pretrained import Model

Prompt = str | list[int]


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
    **options,
) -> list[Completion]:
    """Completes prompts (text, or lists of token ids), batched continuously.

    `sampling` is one SamplingParams or one a prompt; options are those of EngineOptions (max_slots, page_size,
    num_pages, max_step_tokens, kv_cache, ...). Completions come in the order of the prompts, n for each.
    """
    done = {(p.prompt, p.sample): p.completion for p in stream(model, prompts, sampling, **options) if p.completion}
    return [done[key] for key in sorted(done)]


def stream(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    **options,
) -> Iterator[Piece]:
    """Like generate, but yields pieces as tokens come. Bad arguments raise here, not at the first piece."""
    prompts = as_prompts(prompts)
    if isinstance(sampling, SamplingParams):
        sampling = [sampling] * len(prompts)
    if len(sampling) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts need one SamplingParams or {len(prompts)}, not {len(sampling)}")
    samples = sum(s.n for s in sampling)
    options.setdefault("max_slots", max(1, min(samples, 16)))
    engine = Engine(model, **options)
    index = {engine.submit(prompt, params): i for i, (prompt, params) in enumerate(zip(prompts, sampling))}
    return _pieces(engine, index)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], (str, list, tuple))):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _pieces(engine: Engine, index: dict[int, int]) -> Iterator[Piece]:
    for event in engine.run():
        yield Piece(index[event.id], event.sample, event.text, event.token_ids, event.completion)
    engine.close()
