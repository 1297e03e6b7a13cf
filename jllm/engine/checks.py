"""Checks a prompt and its parameters before they may wait for a slot."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING

import jax
import numpy as np

from jllm.config import LlamaConfig
from jllm.engine.request import SamplingParams
from jllm.errors import RequestError, TooLongError
from jllm.parallel.mesh import has_processes

if TYPE_CHECKING:
    from jllm.files.tokenizer import Tokenizer
    from jllm.guides.matcher import Guides


Array = np.ndarray | jax.Array
Prompt = str | Sequence[int] | Array  # text, or token ids


def token_ids(prompt: Prompt, tokenizer: "Tokenizer | None") -> list[int]:
    """Returns a prompt as token ids: text is encoded, lists are taken as they are, arrays become lists of integers."""
    if isinstance(prompt, Array):
        if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
            what = f"an array of {prompt.dtype} and shape {list(prompt.shape)}"
            raise RequestError(f"a prompt's token ids must be integers in one row, not {what}")
        prompt = np.asarray(prompt).tolist()
    if not isinstance(prompt, str) and (isinstance(prompt, bytes) or not hasattr(prompt, "__len__")):
        raise RequestError(f"a prompt must be text or a list of token ids, not {prompt!r}")
    if isinstance(prompt, str) and tokenizer is None:
        raise RequestError("a text prompt needs a tokenizer, and this model has none: give token ids")
    if len(prompt) == 0:
        raise RequestError("the prompt is empty: give at least one character or token id")
    if not isinstance(prompt, str):
        return list(prompt)
    assert tokenizer is not None
    ids = tokenizer.encode(prompt)
    if not ids:
        raise RequestError("the prompt is empty: the tokenizer makes no token of it")
    return ids


def fitted(params: SamplingParams, length: int, most: int) -> SamplingParams:
    """Returns params with max_new_tokens cut to the room behind `length` tokens, if at most `most` tokens fit."""
    tokens = max(1, min(params.max_new_tokens, most - length))
    return params if tokens == params.max_new_tokens else replace(params, max_new_tokens=tokens)


def check_request(
    ids: Sequence[int], params: SamplingParams, config: LlamaConfig, has_tokenizer: bool, most: int | None = None
) -> None:
    """Raises RequestError, in one line, for a request that this model cannot serve. At most `most` tokens fit the page
    pool."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling must be SamplingParams, not {params!r}")
    named = {"prompt": ids, "stop_token_ids": params.stop_token_ids, "logit_bias": params.logit_bias or ()}
    for name, tokens in named.items():
        if _are_ints(tokens) and min(tokens) >= 0 and max(tokens) < config.vocab_size:
            continue
        for token in tokens:
            if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= token < config.vocab_size:
                vocabulary = f"[0, {config.vocab_size}), the model's vocabulary"
                raise RequestError(f"{name}: token id {token!r} is not in {vocabulary}")
    if len(ids) >= config.context:
        what, room = "model's context", config.context
        if most is not None and most < room:
            what, room = "page pool", most
        raise TooLongError(f"a prompt of {len(ids)} tokens is too long: the {what} leaves room for {room - 1}")
    if params.stop and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
    if has_processes(config) and params.seed is None and params.temperature > 0.0:
        raise RequestError("processes share this model, and each would draw a seed of its own: give one")


def checked(
    prompt: Prompt,
    sampling: SamplingParams,
    config: LlamaConfig,
    tokenizer: "Tokenizer | None",
    most: int,
    fits: Callable[[int, int], None],
    guides: "Guides",
) -> list[int]:
    """Returns a prompt's token ids, or raises the error that submitting it would raise. `fits` checks its length and
    its most tokens against the page pool. Compiles a guide, which may take seconds."""
    ids = token_ids(prompt, tokenizer)
    check_request(ids, sampling, config, tokenizer is not None, most)
    fits(len(ids), min(len(ids) + sampling.max_new_tokens, config.context))
    if sampling.guide is not None:
        guides.matcher(sampling.guide)
    return ids


def check_named(sampling: SamplingParams, adapters: Collection[str]) -> None:
    """Raises RequestError for an adapter that is not loaded. `adapters` are the names of those that are."""
    if sampling.adapter is not None and sampling.adapter not in adapters:
        known = f"loaded are {', '.join(adapters)}" if adapters else "none is loaded"
        raise RequestError(f"adapter {sampling.adapter!r} is unknown: {known}")


def _are_ints(tokens: Collection[object]) -> bool:
    """Returns whether there are tokens and all have the type int, as nearly all prompts' do. It runs no Python code for
    each."""
    return set(map(type, tokens)) == {int}


def check_urgency(priority: int, deadline: float | None, config: LlamaConfig | None = None) -> None:
    """Raises RequestError for an invalid priority or deadline, and for any deadline if processes share the model of
    `config`."""
    if not isinstance(priority, Integral) or isinstance(priority, bool):
        raise RequestError(f"priority must be an integer, not {priority!r}")
    number = isinstance(deadline, Real) and not isinstance(deadline, bool)
    if deadline is not None and not (number and 0.0 <= deadline < math.inf):
        raise RequestError(f"deadline must be seconds, a finite number >= 0, or None, not {deadline!r}")
    if deadline is not None and config is not None and has_processes(config):
        raise RequestError("processes share this model, and each has a clock of its own: leave the deadline out")
