"""Defines the input and output of the engine: sampling parameters, completions, events."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple

from jllm.config import MAX_LOGIT_BIAS
from jllm.errors import RequestError, UnknownParameterError
from jllm.guides.guide import Guide

if TYPE_CHECKING:
    import numpy as np

    from jllm.model.sampling import Draws


def _suggests_names[C](cls: type[C]) -> type[C]:
    """Returns a dataclass whose constructor names the likely field in the error for an unknown keyword. Its signature
    stays the same, for editors too."""
    made: Any = cls
    init, names = made.__init__, [f.name for f in fields(made)]

    @wraps(init)
    def checked(self, *args, **given):
        for name in given.keys() - names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
            raise UnknownParameterError(f"{cls.__name__} has no {name!r}: {hint}")
        init(self, *args, **given)

    made.__init__ = checked
    return cls


@_suggests_names
@dataclass(frozen=True)
class SamplingParams:
    """Says how to continue a prompt. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    seed None draws a seed once a request, and the completion has it. logprobs n asks for log-probabilities of the
    chosen token and the n most likely ones. logprobs_mode "raw" takes them of the raw logits. "tempered" takes them of
    the logits divided by the temperature: of the distribution that tokens are drawn from. include_end adds the end
    token or stop id to the completion's token_ids and logprobs. logit_bias maps token ids to addends. guide restricts
    the form of the text (docs/sampling.md). Only tokens that it allows are drawn, and the text ends by an end token. A
    stop string that is one special token stops at its id, since no text shows it. adapter is the name of a loaded
    adapter (docs/adapters.md); None: the model as it is.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    guide: Guide | None = None
    include_end: bool = False
    logprobs_mode: str = "raw"
    adapter: str | None = None

    MAX_LOGPROBS = 20

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._convert("stop", tuple, "a string or a list of strings")
        self._convert("stop_token_ids", tuple, "a list of token ids")
        if self.logit_bias is not None:
            self._convert("logit_bias", dict, "a mapping of token ids to numbers")
        self._check("temperature", _is_real(self.temperature) and self.temperature >= 0.0, "a finite number >= 0")
        self._check("top_k", _is_int(self.top_k) and self.top_k >= 0, "an integer >= 0 (0 is off)")
        self._check("top_p", _is_real(self.top_p) and 0.0 < self.top_p <= 1.0, "in (0, 1] (1 is off)")
        self._check("min_p", _is_real(self.min_p) and 0.0 <= self.min_p < 1.0, "in [0, 1) (0 is off)")
        self._check("n", _is_int(self.n) and self.n >= 1, "an integer >= 1")
        self._check("max_new_tokens", _is_int(self.max_new_tokens) and self.max_new_tokens >= 1, "an integer >= 1")
        self._check("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings")
        ids = self.stop_token_ids
        self._check("stop_token_ids", all(_is_int(i) and i >= 0 for i in ids), "token ids >= 0")
        in_range = self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**32)
        self._check("seed", in_range, "None or an integer in [0, 2**32)")
        few = self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= self.MAX_LOGPROBS)
        self._check("logprobs", few, f"None or an integer in [0, {self.MAX_LOGPROBS}]")
        for name in ("ignore_eos", "prompt_logprobs", "include_end"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        positive = _is_real(self.repetition_penalty) and self.repetition_penalty > 0.0
        self._check("repetition_penalty", positive, "a finite number > 0 (1 is off)")
        self._check("presence_penalty", _is_real(self.presence_penalty), "a finite number")
        self._check("frequency_penalty", _is_real(self.frequency_penalty), "a finite number")
        bias = self.logit_bias or {}
        self._check("logit_bias", len(bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries")
        good = all(_is_int(i) and i >= 0 and (_is_real(b) or b == -math.inf) for i, b in bias.items())
        self._check("guide", self.guide is None or isinstance(self.guide, Guide), "a Guide, such as Guide.json(schema)")
        if self.guide is not None and self.ignore_eos:
            raise RequestError("ignore_eos has no meaning with a guide, which says where a text may end: leave it out")
        named = self.adapter is None or (isinstance(self.adapter, str) and bool(self.adapter))
        self._check("adapter", named, "None or the name of a loaded adapter")
        self._check("logit_bias", good, "a mapping of token ids to numbers below infinity (-inf bans a token)")
        self._check("logprobs_mode", self.logprobs_mode in ("raw", "tempered"), "raw or tempered")
        if self.logprobs_mode == "tempered":
            changing = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
            names = [name for name in changing if getattr(self, name) != getattr(SamplingParams, name)]
            names += [name for name in ("logit_bias", "guide") if getattr(self, name)]
            if names or self.temperature == 0:
                what = f"{names[0]} changes" if names else "temperature 0 does not have"
                raise RequestError(f"logprobs_mode tempered is of softmax(logits / temperature), which {what}: use raw")
            if self.prompt_logprobs:
                raise RequestError("logprobs_mode tempered is of drawn tokens, and prompt_logprobs are raw: use raw")
            if self.logprobs is None:
                raise RequestError("logprobs_mode tempered changes logprobs, and none are asked for: give logprobs=0")

    def _convert(self, name: str, kind: type, right: str):
        try:
            object.__setattr__(self, name, kind(getattr(self, name)))
        except (TypeError, ValueError):
            raise RequestError(f"{name} must be {right}, not {getattr(self, name)!r}") from None

    def _check(self, name: str, ok: bool, right: str):
        if not ok:
            raise RequestError(f"{name} must be {right}, not {getattr(self, name)!r}")

    @property
    def counts_tokens(self) -> bool:
        """Returns whether a penalty depends on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def penalizes(self) -> bool:
        """Returns whether the step must keep token counts or add a bias for this request."""
        return self.counts_tokens or bool(self.logit_bias)

    @property
    def draws(self) -> "Draws":
        """Returns how this request's tokens are drawn."""
        from jllm.model.sampling import Draws  # imports jax, which --help does not need

        if self.temperature == 0:
            return Draws.GREEDY
        return Draws.FILTERED if self.top_k > 0 or self.top_p < 1 or self.min_p > 0 else Draws.NOISE


def _is_int(x) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def _is_real(x: Any) -> bool:
    """Returns whether x is a number that float32, the dtype of parameters on the device, can hold."""
    return isinstance(x, Real) and not isinstance(x, bool) and bool(abs(x) < 3e38)  # type: ignore[operator]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities (natural log, see SamplingParams.logprobs_mode) at one generated token."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens, best first


@dataclass(frozen=True)
class Timings:
    """Holds seconds on a monotonic clock, counted from submission."""

    first_token: float | None  # None if no token came
    total: float  # until its last token was read, or it was aborted
    prompt_tokens: int
    output_tokens: int  # tokens kept in the completion


@dataclass(frozen=True)
class Completion:
    """Holds one finished sample.

    token_ids have neither the prompt nor the end token, stop id or stop text. (With include_end they have the end token
    or stop id.) If the stop text begins within a token, that token is included as a whole.
    """

    token_ids: tuple[int, ...]
    text: str | None  # None without a tokenizer
    # "stop", "length", "abort", "deadline", or "error": logits were not finite, or a step failed or did not compile
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[float, ...] | None  # one for each prompt token after the first
    timings: Timings
    seed: int = 0  # the seed that was used, drawn if none was given
    prompt_ranks: tuple[int, ...] | None = None  # with prompt_logprobs: 1 if the token was the most likely one
    prompt_best: tuple[tuple[int, float], ...] | None = None  # with prompt_logprobs: the most likely token, its logprob
    versions: tuple[int, ...] = ()  # one for each of token_ids: the version of the weights that drew it
    # The values that submit(taps=, tokens=) asked for [n, ...] by name: of the rows that read these tokens.
    taps: Mapping[str, "np.ndarray"] | None = field(default=None, compare=False)


def bias_by_id(given: Mapping[str, float]) -> dict[int, float]:
    """Returns a logit_bias by token id, from JSON, where keys are text. Raises RequestError for a key that is no token
    id, or two of the same."""
    found: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise RequestError(f"logit_bias: keys must be token ids, not {key[:60]!r}")
        if int(key) in found:
            raise RequestError(f"logit_bias: token id {int(key)} occurs twice")
        found[int(key)] = value
    return found


class Event(NamedTuple):
    """Holds a step's news of one sample: the new text and tokens, and the completion once it is finished.

    It is a tuple, since each token makes one, and a frozen dataclass takes longer to make.
    """

    id: int  # the id that submit returned
    sample: int  # 0 .. n-1
    text: str = ""
    token_ids: tuple[int, ...] = ()
    completion: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of token_ids, if the request asks for them
