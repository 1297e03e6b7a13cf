"""Text that a model writes by itself: calibration without any data."""

from typing import Any

import numpy as np

from jllm.api import generate
from jllm.engine.request import SamplingParams
from jllm.errors import EvaluationError
from jllm.model.model import Model


def own_tokens(model: Model, *, rows: int = 32, length: int = 256, seed: int = 0, **options: Any) -> np.ndarray:
    """Returns i32[rows, length] that the model itself writes at temperature 1 after its BOS (or first EOS) token, going
    on after an end: calibration without any data (LLM-QAT, arXiv 2305.17888). The same for the same seed; options are
    EngineOptions'. Raises EvaluationError for a model that has neither."""
    first = model.config.bos_id if model.config.bos_id is not None else next(iter(model.eos_ids), None)
    if first is None:
        raise EvaluationError("the model has neither BOS nor EOS to begin a text with: give calibration tokens")
    seeds = np.random.default_rng(seed).integers(2**31, size=rows).tolist()
    sampling = [SamplingParams(max_new_tokens=length - 1, ignore_eos=True, seed=s) for s in seeds]
    done = generate(model, [[first]] * rows, sampling, **options)
    return np.asarray([[first, *completion.token_ids] for completion in done], np.int32)
