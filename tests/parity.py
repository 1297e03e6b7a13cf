"""The tiny checkpoints of tests/data/parity, and what transformers says about them (tests/data/make_parity.py)."""

from pathlib import Path

import numpy as np

from jllm.step.buckets import Bucket

PARITY = Path(__file__).parent / "data" / "parity"
FAMILIES = sorted(p.name for p in PARITY.iterdir() if (p / "expected.npz").exists())
WIDE = [name for name in FAMILIES if np.load(PARITY / name / "expected.npz")["logits_0"].dtype == np.float64]
OPTIONS = {"max_slots": 3, "page_size": 8, "max_step_tokens": 16, "buckets": (Bucket(3, 16, 3),)}


def expected(family: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Prompt, its logits, and the greedy continuation, of each prompt."""
    data = np.load(PARITY / family / "expected.npz")
    count = sum(name.startswith("prompt_") for name in data.files)
    return [(data[f"prompt_{i}"], data[f"logits_{i}"], data[f"greedy_{i}"]) for i in range(count)]
