"""Runs the tasks of EleutherAI's lm-evaluation-harness through the serving engine, as lm-eval's model `jllm`.

    python -m jllm.analysis.lm_eval run --model jllm --model_args pretrained=DIR,quantize=w8a8 --tasks hellaswag

This is lm-eval's own command with all of its options, and one more model. It needs the extra `eval`. In Python:

    lm_eval.simple_evaluate(model=JllmLM(DIR, kv_cache="int8-g8"), tasks=["lambada_openai"])

Texts become tokens, and long texts become windows, as in lm-eval's class for transformers ("hf"). So a model in the
same dtype gets the same scores. Answers are batch-invariant; the engine forms the batches.
"""

import math
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jllm.errors import EvaluationError, JllmError, between, how_to_install

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    if __name__ != "__main__":
        raise
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(f"{__doc__}\nlm-eval is not installed here, which has the options: {how_to_install('eval')}")
        sys.exit(0)
    print(f"error: lm-eval is not installed ({error}): {how_to_install('eval')} (see --help)", file=sys.stderr)
    sys.exit(2)

import jax
from tqdm import tqdm

from jllm.engine.engine import Engine
from jllm.engine.request import Completion, SamplingParams
from jllm.files.load import BUNDLED, load
from jllm.model.model import Model
from pallas_kernels.starting import INTERRUPTED, raise_interrupts

SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
SCORE = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True, prompt_logprobs=True)
MAX_SLOTS = 32  # default


@register_model("jllm")
class JllmLM(TemplateLM):
    """Is lm-eval's model of the engine.

    pretrained, dtype and quantize are jllm.load's options. kv_cache, max_slots, max_step_tokens, page_size, num_pages
    and backend are the engine's. batch_size sets max_slots, unless it is lm-eval's default of 1 or "auto".

    max_length: most tokens of context before a token (default and limit: the model's context, or what num_pages holds).
    add_bos_token: begin texts with the tokenizer's prefix (default: yes). prefix_token_id: token before a text without
    context (default: BOS, else the end token). seed: base seed of sampled answers; each answer gets its own.

    Raises EvaluationError for settings that cannot be evaluated, and all errors of load and Engine.
    """

    def __init__(
        self,
        pretrained: str | Path | Model = BUNDLED,
        *,
        dtype: str | None = None,
        quantize: str | None = None,
        max_slots: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool = True,
        prefix_token_id: int | None = None,
        seed: int = 1234,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **engine: Any,
    ):
        super().__init__()
        if device not in (None, "cuda:0"):  # "cuda:0" is lm-eval's default
            raise EvaluationError(f"device={device!r} has no meaning here: JAX chooses the device (JAX_PLATFORMS)")
        if max_batch_size is not None:
            raise EvaluationError("max_batch_size has no meaning here: max_slots is what there is")
        self._name = str(pretrained) if isinstance(pretrained, str | Path) else "jllm"
        model = pretrained if isinstance(pretrained, Model) else load(pretrained, dtype=dtype, quantize=quantize)
        if model.tokenizer is None:
            raise EvaluationError(f"{self._name} has no tokenizer, and lm-eval's tasks are texts")
        context, size = model.config.context, model.config.vocab_size
        asked = context if max_length is None else max_length
        _check_in("max_length", asked, 1, context, "the model's context")
        if not isinstance(max_gen_toks, int) or max_gen_toks < 1:
            raise EvaluationError(f"max_gen_toks must be a number from 1 on, not {max_gen_toks!r}")
        if prefix_token_id is not None:
            _check_in("prefix_token_id", prefix_token_id, 0, size - 1, "the model's vocabulary")
        self.tokenizer: Any = model.tokenizer
        self.max_gen_toks, self._add_bos, self._seed = max_gen_toks, add_bos_token, seed
        self._prefix = prefix_token_id
        self._info = {"quantize": quantize, "kv_cache": engine.get("kv_cache")}
        self._model = model
        # The last token of a window is only scored, and one more is sampled; no task reads these two positions.
        roomy = replace(model, config=replace(model.config, context=asked + 2))
        self._engine = Engine(roomy, max_slots=_slots(max_slots, batch_size), **engine)
        room = self._engine.most_tokens - 2
        self.max_length = min(asked, room) if max_length is None else asked
        _check_in("max_length", self.max_length, 1, room, "what the page pool (num_pages) has room for")

    @property
    def eot_token_id(self) -> int:
        ends = self.tokenizer.eos_ids or self._model.eos_ids
        if not ends:
            raise EvaluationError(f"{self._name} names no end token: give prefix_token_id")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        if self._prefix is not None:
            return self._prefix
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise EvaluationError("tasks that begin the answer themselves are not supported with a chat template")
        return self.tokenizer.chat(chat_history)

    def get_model_info(self) -> dict[str, object]:
        """Returns the entries that lm-eval stores with results."""
        leaves = jax.tree.leaves(self._model.params)
        parameters = sum(math.prod(leaf.shape) for leaf in leaves)
        return {"model_num_parameters": parameters, "model_dtype": str(self._model.params.dtype), **self._info}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Returns the token ids of a text. A text that begins with BOS, written out, gets no second BOS."""
        add = self._add_bos if add_special_tokens is None else add_special_tokens
        return self.tokenizer.encode(string, add_bos=add)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for i, request in enumerate(requests):
            (string,) = request.args
            tokens = self.tok_encode(string)
            if not tokens:
                raise EvaluationError(f"document {i} is empty: nothing to score")
            rolled = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            for window in map(make_disjoint_window, rolled):
                windows.append((None, *window))
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Returns the log-probability of each (cache key, context, continuation), and whether greedy decoding gives the
        continuation. Contexts that are too long lose their beginning."""
        prompts = []
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                most = between(1, self.max_length, "{} .. {}")
                raise EvaluationError(f"a continuation must have {most} tokens (max_length), not {len(continuation)}")
            prompts.append((context + continuation)[-(self.max_length + 1) :])
        done = self._run(prompts, [SCORE] * len(prompts), "loglikelihood", disable_tqdm)
        answers = []
        for (key, _, continuation), completion in zip(requests, done, strict=True):
            n = len(continuation)
            assert completion.prompt_logprobs is not None
            assert completion.prompt_ranks is not None
            greedy = all(rank == 1 for rank in completion.prompt_ranks[-n:])
            answers.append((math.fsum(completion.prompt_logprobs[-n:]), greedy))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answers[-1])
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for i, request in enumerate(requests):
            context, given = request.args
            params.append(self._sampling(given, (self._seed + i) % 2**32))
            room = self.max_length - params[-1].max_new_tokens
            if room < 1:
                raise EvaluationError(
                    f"{params[-1].max_new_tokens} new tokens (max_gen_toks) leave no room for a prompt in "
                    f"{self.max_length} (max_length)"
                )
            prompts.append(self.tok_encode(context)[-room:])
        texts = []
        for request, done in zip(requests, self._run(prompts, params, "generate_until", disable_tqdm), strict=True):
            texts.append(self._without_lead(done.text or ""))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _sampling(self, given: dict[str, Any], seed: int) -> SamplingParams:
        """Returns the sampling parameters of a task's generation_kwargs. Raises EvaluationError for an unknown one."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        stop = handle_stop_sequences(options.pop("until", None), eos=None)
        temperature = options.pop("temperature", 1.0)
        temperature = temperature if options.pop("do_sample") else 0.0
        tokens = options.pop("max_gen_toks")
        chosen = {name: options.pop(name) for name in SAMPLING if name in options}
        if options:
            known = ("until", "max_gen_toks", "do_sample", "temperature", *SAMPLING)
            raise EvaluationError(f"generation option {next(iter(options))!r} is not known; known: {', '.join(known)}")
        return SamplingParams(
            temperature=temperature, max_new_tokens=tokens, stop=tuple(filter(None, stop)), seed=seed, **chosen
        )

    def _without_lead(self, text: str) -> str:
        """Returns a text without the leading spaces that decoding drops. Answers are decoded alone, as in "hf"."""
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self.tokenizer.vocabulary.leading_spaces) :]

    def _run(
        self, prompts: list[list[int]], params: Sequence[SamplingParams], what: str, quiet: bool
    ) -> list[Completion]:
        """Returns the completions of all prompts, which run together."""
        ids = {self._engine.submit(prompt, p): i for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))}
        done: dict[int, Completion] = {}
        with tqdm(total=len(ids), desc=f"Running {what} requests", disable=quiet) as bar:
            for event in self._engine.run():
                if event.completion is not None:
                    if event.completion.finish_reason == "error":
                        raise EvaluationError(f"request {ids[event.id]}: the model's logits are not finite")
                    done[ids[event.id]] = event.completion
                    bar.update()
        return [done[i] for i in range(len(ids))]


def _check_in(name: str, value: object, low: int, high: int, what: str) -> None:
    """Raises EvaluationError if a value is out of range. Values of --model_args may have any type."""
    if not isinstance(value, int) or not low <= value <= high:
        raise EvaluationError(f"{name} must be {between(low, high, 'in {} .. {}')}, {what}, not {value!r}")


def _slots(max_slots: int | None, batch_size: int | str | None) -> int:
    """Returns max_slots, or the value of lm-eval's --batch_size."""
    asked = str(batch_size or 1)
    if asked == "1" or asked.startswith("auto"):
        return MAX_SLOTS if max_slots is None else max_slots
    if not asked.isdecimal() or max_slots not in (None, int(asked)):
        raise EvaluationError(f"batch_size must be a number, the same as max_slots, not {batch_size!r}")
    return int(asked)


def main() -> int:
    from lm_eval.__main__ import cli_evaluate

    raise_interrupts()
    try:
        cli_evaluate()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (JllmError, NotImplementedError) as error:  # raised if a backend lacks a dtype or format
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")  # for lm-eval's bootstrap: a fork of a process with JAX may hang
    sys.exit(main())
