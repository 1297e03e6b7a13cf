"""Runs a conversation's turns through an engine, and saves and loads it."""

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

KEY = "conversation"  # a key of a snapshot's metadata


@dataclass(frozen=True)
class Session:
    """Holds an engine that serves one conversation, with its sampling parameters."""

    engine: Engine
    tokenizer: "Tokenizer"
    sampling: SamplingParams
    open_ended: bool = False  # without max_new_tokens: use sampling's, or what fits


def answer(
    session: Session, conversation: Conversation, show: Callable[[str], None], stopped: Callable[[], bool]
) -> tuple[Conversation, Completion]:
    """Shows the answer to the last message as it grows, and returns the conversation with it. Once `stopped`, it
    returns the answer so far. Raises RequestError if there is no room for it."""
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
    """Writes the conversation and the K and V of its tokens to a file. Returns the number of tokens with K and V."""
    ids = conversation.ids[: session.engine.most_tokens - 1]
    if not ids:
        raise RequestError("there is nothing to save yet")
    engine, most = session.engine, len(ids) - 1  # loading computes the last one's
    sampling = SamplingParams(ignore_eos=True, adapter=session.sampling.adapter)
    sampling = fitted(sampling, len(ids), engine.most_tokens)
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
    """Returns a saved conversation, and puts its K and V into the prefix cache. Raises SnapshotError for a file of
    another kind, model, adapter or KV format."""
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
    sampling = SamplingParams(max_new_tokens=1, adapter=session.sampling.adapter)
    session.engine.resume(value, sampling, share=True)
    _finish(session.engine)
    return conversation


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
