"""Writes the model card of a model that train_small made: README.md and loss.png beside the weights.

All of it is computed. Figures come from the results file. Samples come from the model, unedited and from the first
seeds, so anyone can draw them again.
"""

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jllm
from jllm.errors import InputFileError, JllmError, OutputError
from pallas_kernels.bench.command import Parser, interruptible

SAMPLES = (  # prompt, temperature, top-p, seed
    ("Once upon a time", 0.8, 0.95, 0),
    ("Once upon a time", 0.8, 0.95, 1),
    ("Once upon a time", 0.8, 0.95, 2),
    ("There was once a poor woodcutter", 0.8, 0.95, 3),
    ('"Who are you?" said the frog', 0.8, 0.95, 4),
    ("Dorothy", 0.8, 0.95, 5),
    ("Once upon a time", 1.0, 1.0, 6),
)
LENGTH = 300

TEMPLATE = Path(__file__).with_suffix(".md")


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__, prog="python -m experiments.train_card")
    result = "results file of the training run (default: training.json beside the model)"
    parser.add_argument("--results", metavar="FILE", help=result)
    parser.add_argument(
        "--model", default="jllm/assets/fairytale", metavar="DIR", help="folder of the model (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        model = Path(args.model)
        write_card(model, Path(args.results) if args.results else model / "training.json")
    except JllmError as error:
        print(f"train_card: {error}", file=sys.stderr)
        return 2
    return 0


def write_card(model: Path, results: Path) -> None:
    try:
        run = json.loads(results.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputFileError(f"{results}: not a readable results file: {error}") from None
    if not isinstance(run, dict) or not run.get("complete") or not run.get("rows"):
        raise InputFileError(f"{results}: the run did not complete; a card needs one that did")
    text = TEMPLATE.read_text(encoding="utf-8").format(samples="\n".join(samples(model)), length=LENGTH, **figures(run))
    try:
        plot(run["rows"], model / "loss.png")
        (model / "README.md").write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{model}: cannot be written: {error.strerror}") from None


def figures(run: dict[str, Any]) -> dict[str, Any]:
    shape, recipe, rows = run["model"], run["recipe"], run["rows"]
    return {
        "layers": shape["num_layers"],
        "width": shape["hidden_size"],
        "ffn": shape["intermediate_size"],
        "heads": shape["num_heads"],
        "kv_heads": shape["num_kv_heads"],
        "head_dim": shape["head_dim"],
        "context": shape["context"],
        "vocab": shape["vocab_size"],
        **{name: recipe[name] for name in ("rows", "lr", "weight_decay", "dropout")},
        **{name: run[name] for name in ("parameters", "device", "valid_tokens", "valid_bytes")},
        **{name: run[name] for name in ("valid_loss", "valid_bits_per_byte")},
        "steps": rows[-1]["step"],
        "epochs": rows[-1]["epoch"] + 1,
        "seconds": rows[-1]["seconds"],
        "train_loss": rows[-1]["train_loss"],
        "every": recipe["eval_every"],
        "best_step": min(rows, key=lambda row: row["valid_loss"])["step"],
    }


def samples(directory: Path) -> list[str]:
    model = jllm.load(directory)
    params = [
        jllm.SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_new_tokens=LENGTH)
        for _, temperature, top_p, seed in SAMPLES
    ]
    texts = []
    for (prompt, temperature, top_p, seed), done in zip(
        SAMPLES, jllm.generate(model, [prompt for prompt, *_ in SAMPLES], params)
    ):
        end = "stopped by itself" if done.finish_reason == "stop" else f"cut at {LENGTH}"
        head = f"Temperature {temperature}, top-p {top_p}, seed {seed}; {len(done.token_ids)} tokens, {end}:\n"
        paragraphs = (f"**{prompt}**{done.text}").split("\n")
        quoted = [textwrap.fill(p, 118, initial_indent="> ", subsequent_indent="> ") for p in paragraphs if p.strip()]
        texts.append(f"{head}\n" + "\n>\n".join(quoted) + "\n")
    return texts


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, label in (("train_loss", "training (with dropout)"), ("valid_loss", "validation")):
        axes.plot([row["step"] for row in rows], [row[name] for row in rows], label=label)
    axes.set(xlabel="step", ylabel="nats per token", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
