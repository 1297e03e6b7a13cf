"""Chooses options for an engine that serves one run, whose requests are all known when it begins."""

from collections.abc import Collection, Mapping
from numbers import Integral
from typing import Any

from jllm.engine.options import MAX_SLOTS
from jllm.engine.request import SamplingParams
from jllm.step.buckets import Bucket


def options_for_run(requests: Collection[tuple[int, SamplingParams]], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given options, with defaults for sizes that suit one run. A request is the number of its prompt's
    tokens, and its sampling parameters.

    Nearly always all slots decode, so there is no size with fewer. If all requests run at once, only the first steps
    have prompts. Then two sizes are compiled: one with prompts, and one for decoding alone.
    """
    options = {name: value for name, value in given.items() if value is not None}
    samples = sum(sampling.n for _, sampling in requests)
    slots = options.setdefault("max_slots", _slots_for(samples, options))
    if "buckets" in options or not all(_is_size(options.get(name, 1)) for name in ("max_slots", "max_step_tokens")):
        return options  # the engine says what is wrong with them
    at_once = samples <= slots
    total = sum(sampling.n * tokens for tokens, sampling in requests)
    options.setdefault("max_step_tokens", slots + (64 if at_once and total <= 64 else 256))
    most = max(1, options["max_step_tokens"] - slots)
    sizes = (0, most) if at_once else (0, -(-most // 4), most)
    options["buckets"] = tuple(Bucket(slots, tokens, min(slots, tokens)) for tokens in dict.fromkeys(sizes))
    return options


def _slots_for(samples: int, given: Mapping[str, Any]) -> int:
    """Returns a default for max_slots: enough for all samples at once, at most MAX_SLOTS, and no more than the other
    options allow. It is a power of two if possible, so that few different sizes are ever compiled."""
    slots = 1
    while slots < min(samples, MAX_SLOTS):
        slots *= 2
    bounds = [given[name] for name in ("num_pages", "max_step_tokens") if isinstance(given.get(name), int)]
    if isinstance(given.get("buckets"), tuple):
        bounds.append(max((bucket.decodes for bucket in given["buckets"] if isinstance(bucket, Bucket)), default=slots))
    return max(1, min(slots, *bounds)) if bounds else slots


def _is_size(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
