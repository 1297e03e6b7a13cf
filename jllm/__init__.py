"""jllm: a pure-functional LLaMA for inference research on GPUs, in JAX and Pallas."""

from jllm.api import Piece, generate, stream
from jllm.engine.loop import Engine
from jllm.engine.request import Completion, Event, SamplingParams, Timings, TokenLogprob
from jllm.errors import JllmError
from jllm.pretrained import Model, load
from jllm.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Completion",
    "Engine",
    "Event",
    "JllmError",
    "Model",
    "Piece",
    "SamplingParams",
    "Timings",
    "TokenLogprob",
    "Tokenizer",
    "generate",
    "load",
    "load_tokenizer",
    "stream",
]
