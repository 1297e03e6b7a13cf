"""Make tests/data/hooked.npz: what transformers computes in float64 where a forward hook edits one layer.

    pip install torch transformers && python tests/data/make_hooked.py

The model is parity/llama3, widened. Each request i has a prompt int32 [T], a vector float64 [E] that is added to the
output of one layer from one index on, and the logits float64 [V] of the last row.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

DATA = Path(__file__).parent
EDITS = [(0, 0, 7), (1, 3, 12), (0, 5, 9), (1, 0, 3)]  # layer, first index, length of the prompt


@contextlib.contextmanager
def widened() -> Iterator[None]:
    """transformers casts to float32 by name, which here means float64."""
    float32, cast = torch.float32, torch.Tensor.float
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float = torch.float32 = float32
        torch.Tensor.float = cast


def main() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DATA / "parity" / "llama3", dtype=torch.float32).double()
    rng, found = np.random.default_rng(0), {}
    for i, (layer, first, length) in enumerate(EDITS):
        prompt, vector = rng.integers(3, 96, length).astype(np.int32), rng.normal(size=model.config.hidden_size)

        def edit(module, args, output, first=first, vector=vector):
            hidden = output[0] if isinstance(output, tuple) else output
            hidden[:, first:] += torch.tensor(vector)

        handle = model.model.layers[layer].register_forward_hook(edit)
        with widened(), torch.no_grad():
            model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
            logits = model(torch.tensor(prompt[None].astype(np.int64))).logits[0, -1].numpy()
        handle.remove()
        found |= {f"prompt_{i}": prompt, f"vector_{i}": vector, f"logits_{i}": logits}
    edits = np.asarray(EDITS, np.int32)
    np.savez_compressed(DATA / "hooked.npz", layer=edits[:, 0], first=edits[:, 1], **found)


if __name__ == "__main__":
    main()
