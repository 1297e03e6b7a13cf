"""Trains a model by GRPO (arXiv 2402.03300) on rollouts of its own engine, with a reward that is checked.

    python -m experiments.grpo [--steps 40] [--control] [--checkpoint DIR]

Each step draws groups of samples, whose prompts ask for three words. A sample's reward is the share of these words that
its text names, and a half if it ends by itself. The advantage is that of the group. The loss is taken on
jllm.token_logprobs, and optax updates the weights. The engine takes them by `update`.

`gap` is the largest difference between a drawn token's log-probability as the engine gave it and as the trainer
computes it before its first inner step. It is 0: both are one computation. `--not-deterministic` shows what it
is otherwise. Tokens of older weights do not count; `old` is their share. With `--ahead` the engine begins samples
before the weights change, and `--running` says what becomes of them. Those of "keep" have a gap, since they go on over
older K and V. `kl` estimates the KL divergence from the first
model, by the drawn tokens (k3 of http://joschu.net/blog/kl-approx.html). `--control` shuffles the rewards over all
samples of a step, so that nothing is to be learned.

With `--checkpoint` an interrupted run resumes, and gives the same curve. On a CPU two runs give the same curve byte for
byte. On a GPU a gradient is summed in any order, unless XLA_FLAGS=--xla_gpu_deterministic_ops=true forbids it. No
device has measured what that costs.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jllm
from experiments.result_file import ResultFile, command_line, refusing
from experiments.training.later import optax
from experiments.training.resume import Kept, keep, kept
from jllm.config import LlamaConfig
from jllm.engine.engine import RUNNING, Running
from jllm.errors import ConfigError
from jllm.files.load import BUNDLED
from jllm.files.run_identity import digest
from jllm.model.adapters import Adapter
from jllm.model.model import Model
from jllm.model.params import Params
from jllm.quant.quantize import quantize
from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import positive, positive_number, seed_number

Row = dict[str, Any]
Options = tuple[tuple[str, Any], ...]  # of token_logprobs
type Policy = Params | Adapter
POLICY = "policy"  # the name of the adapter that is trained
WORDS = ("king", "wood", "house", "wolf", "mother", "bird", "water", "door", "night", "gold", "horse", "bread")
LOSSES = ("grpo", "dr_grpo", "dapo")
ASKED = 3  # words of a prompt
PROMPT_TOKENS = 48  # for which there is room, or for more if the model's tokenizer makes more of a prompt
ENDED = 0.5  # reward for an end token
FIRST = (0.1, 0.6)  # bounds of the first step's mean reward: there is something to learn
GAINED = 0.1  # reward that a run gains, and a control does not


@dataclass(frozen=True)
class Objective:
    """Holds what an inner step descends, and how."""

    loss: str
    low: float  # the ratio of probabilities is clipped to 1 - low .. 1 + high
    high: float
    lr: float
    new_tokens: int  # the most of a sample

    @property
    def optimizer(self) -> Any:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(self.lr))


@dataclass(frozen=True)
class Recipe:
    """Holds what decides the curve, besides its length."""

    objective: Objective
    prompts: int  # of a step
    group: int  # samples of a prompt
    inner: int  # updates by each step's samples
    mask_cut: bool  # whether samples that were cut by length train nothing
    control: bool
    running: Running
    quantize: str | None
    deterministic: bool
    seed: int
    ahead: int = 0  # steps of the engine that draw the next samples before the weights change
    lora: int | None = None  # the rank of the adapter that is trained; None: all weights are


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollouts:
    """Holds the samples of one step: B = prompts x group rows, L tokens."""

    tokens: Any  # i32[B, L]
    lengths: Any  # i32[B]
    drawn: Any  # f32[B, L] the engine's log-probability of the token after each; 0 elsewhere
    mask: Any  # f32[B, L] 1 where the next token was drawn and trains
    versions: Any  # i32[B, L] of the weights that drew the next token; -1 elsewhere
    rewards: Any  # f32[B]
    advantages: Any  # f32[B]


def prompts_of(recipe: Recipe, step: int) -> list[tuple[str, ...]]:
    """Returns the words that each prompt of a step asks for."""
    rng = np.random.default_rng((recipe.seed, step))
    return [tuple(rng.choice(WORDS, ASKED, replace=False).tolist()) for _ in range(recipe.prompts)]


def reward_of(text: str, words: Sequence[str], ended: bool) -> float:
    """Returns the share of the words that the text names, and a half for an end token."""
    return sum(word in text.lower() for word in words) / len(words) + ENDED * ended


def advantages_of(rewards: np.ndarray, group: int, loss: str) -> np.ndarray:
    """Returns rewards [B] less their group's mean, over its standard deviation unless the loss is dr_grpo."""
    each = rewards.reshape(-1, group)
    found = each - each.mean(axis=1, keepdims=True)
    if loss != "dr_grpo":
        found = found / (each.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    return found.reshape(-1)


@dataclass(frozen=True)
class Asked:
    """Holds the requests of a step, and those of their samples that have ended."""

    words: list[tuple[str, ...]]  # of each prompt
    prompts: list[list[int]]
    ids: list[int]
    done: dict[tuple[int, int], jllm.Completion]  # by request and sample

    def take(self, events: Iterable[jllm.Event]) -> None:
        self.done.update({(e.id, e.sample): e.completion for e in events if e.completion is not None})


def encode(model: Model, words: Sequence[str]) -> list[int]:
    """Returns the prompt that asks for these words. Raises ConfigError for a model without a tokenizer."""
    if model.tokenizer is None:
        raise ConfigError("the rewards are of texts, and this model has no tokenizer: put its files beside its weights")
    return model.tokenizer.encode(f"A tale of the {', the '.join(words)}. Once upon a time")


def ask(engine: jllm.Engine, model: Model, recipe: Recipe, step: int) -> Asked:
    """Submits a step's prompts. The samples of each share its pages."""
    words = prompts_of(recipe, step)
    prompts = [encode(model, each) for each in words]
    options: dict[str, Any] = {"temperature": 1.0, "n": recipe.group, "max_new_tokens": recipe.objective.new_tokens}
    options |= {"adapter": None if recipe.lora is None else POLICY, "logprobs": 0, "include_end": True}
    asked = [jllm.SamplingParams(**options, seed=hash_of(recipe, step, i)) for i in range(len(prompts))]
    return Asked(words, prompts, [engine.submit(*each) for each in zip(prompts, asked)], {})


def rollouts(engine: jllm.Engine, asked: Asked, recipe: Recipe, step: int, length: int) -> Rollouts:
    """Draws the samples to their ends."""
    asked.take(engine.run())
    B = len(asked.ids) * recipe.group
    tokens, lengths, rewards = np.zeros((B, length), np.int32), np.zeros(B, np.int32), np.zeros(B)
    drawn, mask = np.zeros((B, length), np.float32), np.zeros((B, length), np.float32)
    versions = np.full((B, length), -1, np.int32)
    for b in range(B):
        i, sample = divmod(b, recipe.group)
        prompt, completion = asked.prompts[i], asked.done[asked.ids[i], sample]
        assert completion.logprobs is not None, "ask asks for them"
        assert completion.text is not None, "the model has a tokenizer"
        whole, ended = [*prompt, *completion.token_ids], completion.finish_reason == "stop"
        own = slice(len(prompt) - 1, len(whole) - 1)
        tokens[b, : len(whole)], lengths[b] = whole, len(whole)
        drawn[b, own] = [entry.logprob for entry in completion.logprobs]
        mask[b, own] = ended or not recipe.mask_cut
        versions[b, own] = completion.versions
        rewards[b] = reward_of(completion.text, asked.words[i], ended)
    given = np.random.default_rng((recipe.seed, step, 1)).permutation(rewards) if recipe.control else rewards
    advantages = advantages_of(given, recipe.group, recipe.objective.loss).astype(np.float32)
    return Rollouts(tokens, lengths, drawn, mask, versions, rewards, advantages)


def hash_of(recipe: Recipe, step: int, prompt: int) -> int:
    """Returns the seed of a request."""
    return int(np.random.default_rng((recipe.seed, step, 2, prompt)).integers(2**31))


def loss_of(logprobs: jax.Array, batch: Rollouts, objective: Objective) -> jax.Array:
    """Returns the clipped loss of a policy's log-probabilities [B, L]. "grpo" is the mean over samples of each one's
    mean. "dapo" (arXiv 2503.14476) is the mean over all tokens. "dr_grpo" (arXiv 2503.20783) divides by B times the
    longest answer."""
    ratio = jnp.exp(logprobs - batch.drawn)
    clipped = jnp.clip(ratio, 1 - objective.low, 1 + objective.high)
    advantage = batch.advantages[:, None]
    each = -jnp.minimum(ratio * advantage, clipped * advantage) * batch.mask
    if objective.loss == "grpo":
        return (each.sum(axis=1) / jnp.maximum(batch.mask.sum(axis=1), 1)).mean()
    if objective.loss == "dapo":
        return each.sum() / jnp.maximum(batch.mask.sum(), 1)
    return each.sum() / (each.shape[0] * objective.new_tokens)


@partial(jax.jit, static_argnames=("config", "objective", "options"), donate_argnames="state")
def train(
    policy: Policy,
    state: Any,
    batch: Rollouts,
    base: Params | None = None,
    *,
    config: LlamaConfig,
    objective: Objective,
    options: Options,
) -> tuple[Policy, Any, jax.Array]:
    """Returns the policy and the optimizer's state after an inner step, and the log-probabilities before it. The policy
    is all weights, or with `base` an adapter of these."""

    def loss(policy: Any) -> tuple[jax.Array, jax.Array]:
        params, more = (policy, {}) if base is None else (base, {"adapters": policy})
        logprobs: Any = jllm.token_logprobs(params, config, batch.tokens, batch.lengths, **dict(options), **more)
        return loss_of(logprobs, batch, objective), logprobs

    gradient, logprobs = jax.grad(loss, has_aux=True)(policy)
    with jax.numpy_dtype_promotion("standard"):
        changes, state = objective.optimizer.update(gradient, state, policy)
    return optax.apply_updates(policy, changes), state, logprobs


def seen(batch: Rollouts, version: int, first: Any, now: np.ndarray) -> Row:
    """Returns the figures of a step's tokens: those of the newest weights have no gap. `first` and `now` are the first
    model's log-probabilities and the trainer's."""
    own, fresh = batch.versions >= 0, batch.versions == version
    away = (np.asarray(first) - batch.drawn)[own]
    return {
        "gap": float(np.abs(now - batch.drawn)[fresh].max(initial=0)),
        "old": round(1 - float(fresh.sum() / own.sum()), 4),
        "kl": round(float((np.exp(away) - away - 1).mean()), 6),
        "tokens": int(own.sum()),
    }


def curve(model: Model, recipe: Recipe, steps: int, folder: Path | None, about: Row) -> Iterator[Row]:
    """Trains, and yields a row of each step. Rows of an interrupted run come first."""
    longest = max(PROMPT_TOKENS, *(len(encode(model, words)) for words in permutations(WORDS, ASKED)))
    length = -(-(longest + recipe.objective.new_tokens) // 16) * 16
    base: Params | None = None
    policy: Any = model.params
    if recipe.lora is not None:
        base = model.params
        policy = jllm.init_adapter(model.config, jax.random.key(recipe.seed), recipe.lora, alpha=2.0 * recipe.lora)
    state = recipe.objective.optimizer.init(policy)
    before = None if folder is None else kept(folder, about, (policy, state))
    rows: list[Row] = []
    if before is not None:
        (policy, state), rows = before.state, before.rows
        yield from rows
    served = replace(model, params=quantize(model.params, recipe.quantize)) if recipe.quantize else model
    slots = min(64, recipe.prompts * recipe.group)
    sizes: dict[str, Any] = {"max_slots": slots, "max_step_tokens": 2 * slots, "deterministic": recipe.deterministic}
    if base is not None:
        sizes["adapters"] = {POLICY: policy}
    engine = jllm.Engine(served, **sizes, executables=None)
    options = engine.token_logprobs_options()
    how: dict[str, Any] = {"objective": recipe.objective, "options": tuple(options.items())}
    refer = jax.jit(partial(jllm.token_logprobs, config=model.config, **options))
    asked: Asked | None = None
    for step in range(len(rows), steps):
        begin = time.perf_counter()
        if base is None:
            version = engine.update(policy, running=recipe.running, quantize=recipe.quantize)
        else:
            version = engine.adapters.update(POLICY, policy, running=recipe.running)
        batch = rollouts(engine, asked or ask(engine, model, recipe, step), recipe, step, length)
        if recipe.ahead and step + 1 < steps:
            asked = ask(engine, model, recipe, step + 1)
            for _ in range(recipe.ahead):
                asked.take(engine.step())
        else:
            engine.sleep()
        drew = time.perf_counter()
        first = refer(model.params, tokens=batch.tokens, lengths=batch.lengths)
        before_step = []
        for _ in range(recipe.inner):
            policy, state, logprobs = train(policy, state, batch, base, config=model.config, **how)
            before_step.append(np.asarray(logprobs))
        engine.wake()
        row = {
            "step": step,
            "reward": round(float(batch.rewards.mean()), 4),
            **seen(batch, version, first, before_step[0]),
            "rollout_s": round(drew - begin, 2),
            "train_s": round(time.perf_counter() - drew, 2),
        }
        rows.append(row)
        if folder is not None:
            keep(folder, about, Kept((policy, state), rows))
        yield row
    engine.close()


@refusing
def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    objective, own = Objective(**of(Objective, args)), of(Recipe, args)
    recipe = Recipe(objective, **own)
    model = jllm.load(args.model, dtype="float32")
    about = {"recipe": asdict(recipe), "model": digest(np.asarray(x).tobytes() for x in jax.tree.leaves(model.params))}
    command = command_line("grpo", argv)
    with ResultFile(args.results, "grpo", command, args.label, recipe=about["recipe"]) as results:
        shown = tqdm(
            curve(model, recipe, args.steps, args.checkpoint, about), total=args.steps, desc="GRPO", disable=None
        )
        results.fill(shown, lambda rows: bars_of(rows, recipe))
    if args.json:
        print(json.dumps(results.document))
    return 0


def of(kind: type, args: argparse.Namespace) -> Row:
    """Returns the arguments that are fields of a dataclass."""
    return {each.name: getattr(args, each.name) for each in fields(kind) if hasattr(args, each.name)}


def bars_of(rows: list[Row], recipe: Recipe) -> list[Row]:
    """Returns the bars of a run: something is there to learn and is learned, and trainer and sampler are one. A control
    learns nothing."""
    some = max(1, min(5, len(rows) // 4))
    first, last = (float(np.mean([row["reward"] for row in part])) for part in (rows[:some], rows[-some:]))
    found = [bar("first mean reward", rows[0]["reward"], "", FIRST[i], most=bool(i)) for i in (0, 1)]
    if recipe.deterministic and recipe.running != "keep":
        found.append(bar("largest gap", max(row["gap"] for row in rows), "nats", 0, most=True))
    gained = round(last - first, 4)
    return [*found, bar("reward gained", abs(gained) if recipe.control else gained, "", GAINED, most=recipe.control)]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--model", default=BUNDLED, help="folder or id")
    parser.add_argument("--steps", type=positive, default=40, help="rollouts, each with its updates")
    parser.add_argument("--prompts", type=positive, default=8, help="prompts of a step")
    parser.add_argument("--group", type=positive, default=16, help="samples of a prompt")
    parser.add_argument("--new-tokens", type=positive, default=48, help="the most tokens of a sample")
    parser.add_argument("--inner", type=positive, default=1, help="updates by each step's samples")
    parser.add_argument("--lr", type=positive_number, default=3e-5, help="learning rate of Adam")
    parser.add_argument("--loss", choices=LOSSES, default="grpo", help="how tokens are averaged")
    parser.add_argument("--low", type=positive_number, default=0.2, help="clips ratios below 1 - LOW")
    parser.add_argument("--high", type=positive_number, default=0.2, help="clips ratios above 1 + HIGH")
    parser.add_argument("--mask-cut", action="store_true", help="train nothing on samples that were cut by length")
    parser.add_argument("--control", action="store_true", help="shuffle the rewards")
    ahead = "steps of the engine that draw the next samples before the weights change"
    parser.add_argument("--ahead", type=positive, default=0, metavar="STEPS", help=ahead)
    running = "what becomes of the samples that --ahead began, as in Engine.update"
    parser.add_argument("--running", choices=RUNNING, default=RUNNING[0], help=running)
    parser.add_argument("--quantize", help="scheme of the weights that draw")
    parser.add_argument("--lora", type=positive, metavar="RANK", help="train an adapter of this rank, not the weights")
    parser.add_argument("--not-deterministic", dest="deterministic", action="store_false", help="draw in any order")
    parser.add_argument("--seed", type=seed_number, default=0, help="decides prompts and draws")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="keep the state there, and go on from it")
    add_result_options(parser)
    args = parser.parse_args(argv)
    if args.running != RUNNING[0] and not args.ahead:
        parser.error(f"--running {args.running} needs --ahead: else no sample runs while the weights change")
    if args.group < 2:
        parser.error("--group 1 must be at least 2: an advantage is over the other samples of a prompt")
    if args.ahead and args.checkpoint:
        parser.error("--ahead and --checkpoint do not go together: samples that run are not kept")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
