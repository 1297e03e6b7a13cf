"""A conversation's turns through an engine, and its file."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jllm.cli.chat.conversation import Conversation, from_json, prompt_ids
from jllm.cli.jsonl import nth_seed
from jllm.engine.checks import fitted
from jllm.engine.engine import Engine
from jllm.engine.request import Completion, SamplingParams
from jllm.errors import CheckpointError, RequestError, SnapshotError
from jllm.files import snapshot as snapshots
from jllm.files.safetensors_io import read_metadata

if TYPE_CHECKING:
    from jllm.files.tokenizer import Tokenizer

KEY = "conversation"  # in a snapshot's metadata


@dataclass(frozen=True)
class Session:
    """What answers: an engine that serves nothing else."""

    engine: Engine
    tokenizer: "Tokenizer"
    sampling: SamplingParams
    open_ended: bool = False  # nothing says how many new tokens: as sampling does, or as many as there is room for


def answer(
    session: Session, conversation: Conversation, show: Callable[[str], None], stopped: Callable[[], bool]
) -> tuple[Conversation, Completion]:
    """Returns the conversation with the answer to its last message, which is shown as it comes; what there is of it,
    once `stopped`. Raises RequestError where there is no room for it."""
    engine, prompt = session.engine, prompt_ids(conversation, session.tokenizer)
    seed = nth_seed(session.sampling.seed, len(conversation.asked) - 1)
    sampling = replace(session.sampling, seed=seed)
    if session.open_ended:
        sampling = fitted(sampling, len(prompt), engine.most_tokens)
    request, done = engine.submit(prompt, sampling), None
    while engine.has_work:
        if stopped():
            with contextlib.suppress(RequestError):  # it has just ended by itself
                engine.abort(request)
        for event in engine.step():
            show(event.text)
            done = event.completion or done
    assert done is not None
    return conversation.answer(done.text or "", [*prompt, *done.token_ids]), done


def save(session: Session, conversation: Conversation, path: Path) -> int:
    """Writes the conversation and the K and V of its tokens to a file; returns how many tokens have theirs in it."""
    ids = conversation.ids[: session.engine.most_tokens - 1]
    if not ids:
        raise RequestError("there is nothing to save yet")
    engine, most = session.engine, len(ids) - 1  # the last one's are computed on loading
    sampling = fitted(SamplingParams(ignore_eos=True), len(ids), engine.most_tokens)
    request = engine.submit(ids, sampling)  # most of its K and V is in the prefix cache
    try:
        engine.step()
        while (value := engine.snapshot(request)).length < most - most % engine.sizes.limits.block:
            engine.step()
    finally:
        engine.abort(request)
        _finish(engine)
    snapshots.save_snapshot(path, value, {KEY: conversation.to_json()})
    return value.length


def load(session: Session, path: Path) -> Conversation:
    """Returns a conversation as it was saved; its K and V are in the prefix cache from here on. SnapshotError for a
    file of another kind, another model or another KV format."""
    try:
        text = read_metadata(path).get(KEY)
    except CheckpointError as error:
        raise SnapshotError(str(error)) from None
    if text is None:
        raise SnapshotError(f"{path}: not a conversation: /save writes those")
    value = snapshots.load_snapshot(path)
    try:
        conversation = from_json(text, value.tokens.tolist())
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from None
    session.engine.resume(value, SamplingParams(max_new_tokens=1), share=True)
    _finish(session.engine)
    return conversation


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
