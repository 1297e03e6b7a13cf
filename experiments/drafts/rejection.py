"""Compares drafts accepted by rejection sampling, the field's baseline, with drafts that must equal the target's draw.

Let the target draw a draft with probability p, and the drafter with q. Rejection accepts it with probability min(1, p /
q), and else draws from max(p - q, 0) (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). It accepts 1
- TV of drafts, where TV is the total variation distance of p and q. The engine's equality accepts at least (1 - TV) /
(1 + TV) (Daliri et al., arXiv 2408.07978). Both keep the target's distribution.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.arguments import check_backend
from experiments.drafts.acceptance import DRAFTS, Served, interval, serve
from experiments.drafts.workloads import stories
from jllm.engine.drafters import find_drafter
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError
from jllm.files.load import load
from jllm.model.backbone import packed_logits
from jllm.model.model import Model
from jllm.model.paged import Packed
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.quantized_copy import QuantizedCopy
from jllm.step.buckets import Bucket

Row = dict[str, Any]
DRAWS = 64  # draws from each pair of distributions


def by_equality(p: np.ndarray, q: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws tokens and drafts from p and q [n, V] with the same noise. Returns tokens [n], and which of them equal the
    drafts."""
    noise = rng.exponential(size=p.shape)
    tokens, drafts = ((noise / np.maximum(x, 1e-300)).argmin(axis=1) for x in (p, q))
    return tokens, tokens == drafts


def by_rejection(p: np.ndarray, q: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws drafts from q [n, V], and accepts them for p [n, V] or draws from the rest. Returns tokens [n], and which
    drafts were accepted."""
    drafts = _draw(q, rng)
    row = np.arange(len(drafts))
    accepted = rng.random(len(drafts)) * q[row, drafts] < p[row, drafts]
    rest = np.maximum(p - q, 0)
    rest = np.where(rest.sum(axis=1, keepdims=True) > 0, rest, p)  # equal rows, which always accept
    return np.where(accepted, drafts, _draw(rest, rng)), accepted


def _draw(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns a token [n] for each row of weights [n, V]."""
    sums = weights.cumsum(axis=1)
    return (sums <= rng.random((len(sums), 1)) * sums[:, -1:]).sum(axis=1)


MODES: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {"equal": by_equality, "rejection": by_rejection}


@dataclass(frozen=True)
class Compared:
    """The distributions [n, V] of a text's next tokens."""

    target: np.ndarray
    draft: np.ndarray


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yields how often each mode accepts the draft after a token of the target's own texts. Raises ConfigError for a
    model without a tokenizer."""
    check_backend(args.backend)
    model = load(args.model)
    drafts = draft_model(args.drafter, model)
    if model.tokenizer is None:
        raise ConfigError("the model has no tokenizer, by which stories become tokens")
    if args.tokens >= model.config.context:
        raise ConfigError(f"--tokens {args.tokens}: the model's context is {model.config.context}, prompt included")
    prompts = stories(model.tokenizer, args.documents)
    model = replace(model, tokenizer=None)
    for temperature in (0.7, 1.0):
        engine = one_slot(model, max(map(len, prompts)), args)
        served = serve_documents(engine, prompts, temperature, args.tokens)
        engine.close()
        texts = [compared(model, drafts, (*p, *s.tokens), len(p), temperature) for p, s in zip(prompts, served)]
        for name, mode in MODES.items():
            found = [share(mode, text) for text in texts]
            yield {
                "acceptance": name,
                "drafter": args.drafter,
                "documents": len(prompts),
                "temperature": temperature,
                "accepted": round(float(np.mean(found)), 4),
                "accepted_95": interval(found, np.mean),
            }


def draft_model(name: str, model: Model) -> Model:
    """Returns a drafter's model. Raises ConfigError for a drafter that is not a model of the same tokens."""
    drafter = find_drafter(name, model, DRAFTS)
    if isinstance(drafter, QuantizedCopy):
        return Model(model.config, drafter.params)
    if not isinstance(drafter, DraftModel) or drafter.target_ids is not None:
        raise ConfigError(f"--drafter {name}: rejection takes a draft model of all the model's tokens, or copy:SCHEME")
    return Model(drafter.config, drafter.params)


def compared(model: Model, drafts: Model, text: tuple[int, ...], first: int, temperature: float) -> Compared:
    """Returns the distributions of a text's tokens from index `first` on, by the target and by a draft model."""
    length = -(-len(text) // 64) * 64  # few lengths, each of which compiles
    pair = (logits_of(each, text, length)[first - 1 : len(text) - 1] for each in (model, drafts))
    return Compared(*(np.exp(log_softmax(logits.astype(np.float64) / temperature)) for logits in pair))


def share(mode: Callable[..., tuple[np.ndarray, np.ndarray]], text: Compared) -> float:
    """Returns the share of a text's drafts that a mode accepts, with a fixed seed."""
    rng = np.random.default_rng(0)
    return float(np.mean([mode(text.target, text.draft, rng)[1].mean() for _ in range(DRAWS)]))


def one_slot(model: Model, prompt: int, args: argparse.Namespace) -> Engine:
    """Returns an engine of one slot, for prompts of at most `prompt` tokens."""
    buckets = (Bucket(1, 0, 0), Bucket(1, prompt, 1))
    sizes: dict[str, Any] = {"max_slots": 1, "max_step_tokens": prompt + 1, "buckets": buckets, "prefix_cache": False}
    return Engine(model, backend=args.backend, **sizes)


def serve_documents(engine: Engine, prompts: Sequence[list[int]], temperature: float, tokens: int) -> list[Served]:
    asked: Row = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
    return [serve(engine, prompt, SamplingParams(seed=i, **asked)) for i, prompt in enumerate(prompts)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits - logits.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def logits_of(model: Model, tokens: Sequence[int], length: int) -> np.ndarray:
    """Returns logits [length, V] of a text, padded with zeros."""
    padded, row = jnp.asarray([*tokens, *[0] * (length - len(tokens))], jnp.int32), jnp.arange(length, dtype=jnp.int32)
    return np.asarray(_logits(model.params, Packed(padded, row, jnp.zeros_like(row)), config=model.config))


_logits = jax.jit(lambda params, batch, config: packed_logits(params, config, batch), static_argnames="config")
