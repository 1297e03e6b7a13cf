"""Serves a small model whose chat template takes tools, until it is stopped: python -m tests.clients.serve_small."""

import sys
import tempfile
from pathlib import Path

import safetensors.numpy

from jllm.serve.main import main
from tests.serve.conftest import write_tool_checkpoint

CONTEXT = 4096  # clients' own prompts are long
END, SURE, LIKELY = 1, 1000.0, 2.0


def write_small(path: Path) -> None:
    """Writes a model that says the same at any temperature, and ends an answer where a guide lets it."""
    write_tool_checkpoint(path, CONTEXT)
    file = path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    embedding, head, norm = (tensors[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head", "model.norm"))
    embedding[:, 0] = 1.0  # a feature that every token has, so that the head has a bias
    head[:, 0] = 0.0
    head[END, 0] = LIKELY / norm[0]
    head *= SURE
    safetensors.numpy.save_file(tensors, file, {"format": "pt"})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_small(Path(folder))
        options = ["--model", folder, "--served-name", "small", "--port", "0", "--max-slots", "4"]
        sys.exit(main([*options, "--max-step-tokens", "256", *sys.argv[1:]]))
