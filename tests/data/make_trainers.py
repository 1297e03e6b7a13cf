"""Makes tests/data/trainers.npz: what torch, transformers and trl compute when they train parity's models in float64.

    pip install torch transformers trl && python -m tests.data.make_trainers

The arrays are sketches of tensors by their names in files (sketch.py): float64 [tensors, SIGNS].

    gradient/<family>          of `objective`, by autograd with transformers' float32 casts widened
    unpatched/<family>         the same with its casts as they are
    adam/<family>              the weights after a step of torch.optim.Adam from there
    <loss>/<step>/<what>       of trl's GRPOTrainer, before step 0 and 1 of one rollout, both of the same samples:
                               `loss`, and after the step `policy`, and Adam's `mu` and `nu`
    <loss>/clipped             the share of step 1's tokens whose ratio is clipped

Beside them are the inputs, and `versions` as JSON.
"""

import json
import tempfile
from pathlib import Path

import datasets
import numpy as np
import torch
import transformers
import trl
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.data.sketch import sketch
from tests.data.widened import widened

DATA = Path(__file__).parent
FAMILIES = ("llama3.2", "olmoe")
TRAINED, LR = "llama3.2", 1e-4
LOSSES = {  # options of GRPOConfig
    "grpo": {"epsilon": 0.2, "epsilon_high": 0.2, "scale_rewards": "group", "mask_truncated_completions": True},
    "dr_grpo": {"epsilon": 0.05, "epsilon_high": 0.1, "scale_rewards": "none"},
    "dapo": {"epsilon": 0.2, "epsilon_high": 0.28, "scale_rewards": "group", "mask_truncated_completions": True},
}
GROUP, LONGEST, END = 4, 8, 2  # samples of a prompt, tokens of a sample, the end token
PROMPTS = ((5, 6, 7), (8, 9, 10, 11, 12))
ENDS = (7, 3, 8, 5, 8, 1, 4, 6)  # the samples' lengths: those of LONGEST tokens are cut
REWARDS = (1.5, 0.5, 1 / 3, 0.0, 0.75, 0.75, 0.25, 1.0)
Arrays = dict[str, np.ndarray]


def batch(vocabulary: int) -> Arrays:
    """Returns tokens [3, 13], lengths, and the weights of `objective`."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, vocabulary, (3, 13))
    return {"tokens": tokens, "lengths": np.asarray([13, 7, 2]), "weights": rng.standard_normal((3, 13))}


def loaded(family: str) -> torch.nn.Module:
    folder = DATA / "parity" / family
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).double()


def wide(family: str) -> torch.nn.Module:
    """Returns a model whose rotary frequencies are made within `widened`."""
    model = loaded(family)
    with widened():
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


def objective(model: torch.nn.Module, given: Arrays) -> torch.Tensor:
    """Returns a weighted sum of log-probabilities and half of the entropies, at temperature 0.75."""
    tokens, lengths, weights = (torch.tensor(given[name]) for name in ("tokens", "lengths", "weights"))
    logp = torch.log_softmax(model(tokens, use_cache=False).logits[:, :-1] / 0.75, -1)
    chosen = logp.gather(-1, tokens[:, 1:, None])[..., 0] - (logp.exp() * logp).sum(-1) / 2
    used = torch.arange(tokens.shape[1] - 1)[None] < lengths[:, None] - 1
    return (chosen * weights[:, :-1] * used).sum()


def tensors(model: torch.nn.Module, values: dict[torch.nn.Parameter, torch.Tensor]) -> Arrays:
    """Returns other values than its weights by the names that these have in files."""
    weights = {p: p.data for p in model.parameters()}
    with tempfile.TemporaryDirectory() as folder:
        for p in weights:
            p.data = values[p].detach().clone()
        model.save_pretrained(folder)
        for p, data in weights.items():
            p.data = data
        return {name: x.numpy() for name, x in load_file(Path(folder) / "model.safetensors").items()}


def gradients(family: str) -> Arrays:
    model, found = loaded(family), {}
    given = batch(model.config.vocab_size)
    objective(model, given).backward()
    found[f"unpatched/{family}"] = sketch(tensors(model, {p: p.grad for p in model.parameters()}))
    model = wide(family)
    optimizer = torch.optim.Adam(model.parameters(), LR)
    with widened():
        objective(model, given).backward()
    found[f"gradient/{family}"] = sketch(tensors(model, {p: p.grad for p in model.parameters()}))
    optimizer.step()
    found[f"adam/{family}"] = sketch(tensors(model, {p: p.data for p in model.parameters()}))
    return found | {f"{name}/{family}": x for name, x in given.items()}


def samples() -> list[list[int]]:
    rng = np.random.default_rng(1)
    found = [rng.integers(3, 96, n).tolist() for n in ENDS]
    return [one if len(one) == LONGEST else [*one[:-1], END] for one in found]


class Given(trl.GRPOTrainer):
    """Trains on given samples, and notes what it computes."""

    def __init__(self, *args: object, **options: object):
        super().__init__(*args, **options)
        self.found: dict[str, np.ndarray] = {}

    def _generate_single_turn(self, prompt_ids: list, *args: object, **options: object) -> tuple[list, None]:
        assert prompt_ids == [list(prompt) for prompt in PROMPTS for _ in range(GROUP)]
        return samples(), None

    def _compute_loss(self, model: torch.nn.Module, inputs: dict) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        self.found[f"{self.state.global_step}/loss"] = np.asarray(loss.item())
        return loss


class Noting(transformers.TrainerCallback):
    """Notes weights and Adam's state after each step."""

    trainer: Given

    def on_optimizer_step(self, args: object, state: transformers.TrainerState, control: object, **_: object) -> None:
        model, kept = self.trainer.model, self.trainer.optimizer.optimizer.state
        values = {
            "policy": {p: p.data for p in model.parameters()},
            "mu": {p: kept[p]["exp_avg"] for p in model.parameters()},
            "nu": {p: kept[p]["exp_avg_sq"] for p in model.parameters()},
        }
        for name, each in values.items():
            self.trainer.found[f"{state.global_step}/{name}"] = sketch(tensors(model, each))


def tokenizer(vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """Returns one whose words are ids."""
    special = {0: "<pad>", 1: "<s>", END: "</s>"}
    made = Tokenizer(WordLevel({special.get(i, str(i)): i for i in range(vocabulary)}, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def rewards(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [REWARDS[samples().index(list(ids))] for ids in completion_ids]


def trained(loss: str, options: dict) -> Arrays:
    """Returns what trl computes in two steps on the same samples."""
    model = wide(TRAINED)
    noting = Noting()
    with tempfile.TemporaryDirectory() as folder, widened():
        config = trl.GRPOConfig(
            folder,
            loss_type=loss,
            num_generations=GROUP,
            per_device_train_batch_size=len(REWARDS),
            num_iterations=2,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            max_steps=2,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_completion_length=LONGEST,
            beta=0.0,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **options,
        )
        rows = datasets.Dataset.from_dict({"prompt": [" ".join(map(str, prompt)) for prompt in PROMPTS]})
        tokens = tokenizer(model.config.vocab_size)
        trainer = Given(model, rewards, config, train_dataset=rows, processing_class=tokens, callbacks=[noting])
        noting.trainer = trainer
        trainer.train()
    clipped = [row["clip_ratio/region_mean"] for row in trainer.state.log_history if "clip_ratio/region_mean" in row]
    assert clipped[0] == 0 < clipped[1] < 1, clipped
    found = {f"{loss}/{name}": x for name, x in trainer.found.items()}
    return found | {f"{loss}/clipped": np.asarray(clipped[1])}


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    arrays: Arrays = {}
    for family in FAMILIES:
        arrays |= gradients(family)
    for loss, options in LOSSES.items():
        arrays |= trained(loss, options)
        print(loss, {name: float(x) for name, x in arrays.items() if name.startswith(loss) and not x.ndim})
    versions = {module.__name__: module.__version__ for module in (torch, transformers, trl)}
    flat = [np.asarray([*prompt, *ids]) for prompt, ids in zip((p for p in PROMPTS for _ in range(GROUP)), samples())]
    arrays["prompts"] = np.repeat([len(prompt) for prompt in PROMPTS], GROUP)
    arrays["samples"] = np.stack([np.pad(row, (0, 13 - len(row))) for row in flat])
    arrays["ends"], arrays["rewards"] = np.asarray(ENDS), np.asarray(REWARDS)
    np.savez_compressed(DATA / "trainers.npz", versions=json.dumps(versions), **arrays)
    print(versions, (DATA / "trainers.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
