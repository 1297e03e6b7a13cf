"""Computes head_logprobs from its formula, one row at a time in float64 numpy, and its analytic gradient."""

import numpy as np
from numpy.typing import ArrayLike


def _probabilities(x: np.ndarray, w: np.ndarray, temperature: float, softcap: float | None) -> np.ndarray:
    z = w @ x if softcap is None else softcap * np.tanh(w @ x / softcap)
    z = z / temperature
    p = np.exp(z - z.max())
    return p / p.sum()


def head_logprobs(
    x: ArrayLike, w: ArrayLike, tokens: ArrayLike, temperature: ArrayLike, softcap: float | None = None
) -> np.ndarray:
    """Returns float64 [2, T]: log-probabilities and entropies. Arguments are api.py's, concrete."""
    rows, weights = np.asarray(x, np.float64), np.asarray(w, np.float64)
    out = np.zeros((2, len(rows)))
    for t, (token, heat) in enumerate(zip(np.asarray(tokens), np.asarray(temperature, np.float64))):
        p = _probabilities(rows[t], weights, heat, softcap)
        out[:, t] = np.log(p[token]), -(p * np.log(p)).sum()
    return out


def head_logprobs_grad(
    x: ArrayLike,
    w: ArrayLike,
    tokens: ArrayLike,
    temperature: ArrayLike,
    dout: np.ndarray,
    softcap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gradients of sum(out * dout) by x and w, float64, for dout [2, T]."""
    rows, weights = np.asarray(x, np.float64), np.asarray(w, np.float64)
    dx, dw = np.zeros_like(rows), np.zeros_like(weights)
    for t, (token, heat) in enumerate(zip(np.asarray(tokens), np.asarray(temperature, np.float64))):
        p = _probabilities(rows[t], weights, heat, softcap)
        of_entropy = -p * (np.log(p) - (p * np.log(p)).sum())
        dz = (dout[0, t] * (np.eye(len(p))[token] - p) + dout[1, t] * of_entropy) / heat
        if softcap is not None:
            dz = dz / np.cosh(weights @ rows[t] / softcap) ** 2
        dx[t] = dz @ weights
        dw += np.outer(dz, rows[t])
    return dx, dw
