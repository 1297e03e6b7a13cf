"""Widens what transformers computes in float32."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def widened() -> Iterator[None]:
    """transformers casts to float32 by name, which here means float64. New tensors are float64 too."""
    float32, cast, default = torch.float32, torch.Tensor.float, torch.get_default_dtype()
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float = torch.float32 = float32
        torch.Tensor.float = cast
        torch.set_default_dtype(default)
