"""Generates a model's own text, for calibration without data."""

from typing import Unpack

import numpy as np

from jllm.api import generate
from jllm.engine.options import EngineKeywords
from jllm.engine.request import SamplingParams
from jllm.errors import EvaluationError
from jllm.model.model import Model


def own_tokens(
    model: Model, *, rows: int = 32, length: int = 256, seed: int = 0, **options: Unpack[EngineKeywords]
) -> np.ndarray:
    """Returns i32[rows, length] of text that the model writes at temperature 1 after its BOS (or first EOS) token. It
    continues after end tokens. This is calibration without data (LLM-QAT, arXiv 2305.17888). The same seed gives the
    same tokens. Options are those of EngineOptions. Raises EvaluationError for a model without BOS and EOS."""
    first = model.config.bos_id if model.config.bos_id is not None else next(iter(model.eos_ids), None)
    if first is None:
        raise EvaluationError("the model has neither BOS nor EOS to begin a text with: give calibration tokens")
    seeds = np.random.default_rng(seed).integers(2**31, size=rows).tolist()
    sampling = [SamplingParams(max_new_tokens=length - 1, ignore_eos=True, seed=s) for s in seeds]
    done = generate(model, [[first]] * rows, sampling, **options)
    return np.asarray([[first, *completion.token_ids] for completion in done], np.int32)
