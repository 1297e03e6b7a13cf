"""Computes route from its definition, one token and one expert at a time, in numpy."""

import numpy as np
from numpy.typing import ArrayLike


def choose(scores: ArrayLike, chosen: int) -> np.ndarray:
    """Returns the numbers of each token's experts, the best first."""
    return np.argsort(-np.asarray(scores, np.float64), axis=1, kind="stable")[:, :chosen]


def shares_of(scores: ArrayLike, routes: ArrayLike, normalize: bool) -> np.ndarray:
    """Returns the share of each expert of `routes` [T, k], float64: none if there is no such expert."""
    scores = np.asarray(scores, np.float64)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares = np.zeros(np.shape(routes))
    for t, experts in enumerate(np.asarray(routes).tolist()):
        for j, expert in enumerate(experts):
            if 0 <= expert < scores.shape[1]:
                shares[t, j] = powers[t, expert] / powers[t].sum()
        if normalize:
            shares[t] /= shares[t].sum() or 1
    return shares


def sort_rows(routes: ArrayLike, experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the token of each sorted row, and the rows of each expert. Then come the places of a token's rows in the
    order of their experts' numbers, and which of its routes each one is."""
    routes = np.asarray(routes)
    tokens, k = routes.shape
    pairs = [(routes[t, j] if 0 <= routes[t, j] < experts else experts, t, j) for t in range(tokens) for j in range(k)]
    order = sorted(pairs)
    place_of = {(t, j): place for place, (_, t, j) in enumerate(order)}
    which = np.argsort(routes, axis=1, kind="stable")
    places = np.asarray([[place_of[t, j] for j in mine] for t, mine in enumerate(which.tolist())])
    sizes = np.bincount([expert for expert, _, _ in order], minlength=experts + 1)[:experts]
    return np.asarray([t for _, t, _ in order]), sizes, places, which
