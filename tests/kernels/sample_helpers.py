"""Makes rows with everything odd in them for the tests of sample, and measures how far a token is from the right
one."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.sample import reference
from pallas_kernels.sample.cases import MIXED, arguments

ROUNDING = 1e-4  # of float32 scores, which are 512 at most
ODD = (  # how a row's logits are spoilt
    "plain", "ties", "bans", "nan", "+inf", "-inf everywhere", "nan everywhere", "equal", "far apart", "last", "first",
)  # fmt: skip


def mixed_rows(vocabulary: int, seed: int = 0, spread: float = 3.0) -> tuple[np.ndarray, list]:
    """Returns one row for each of MIXED."""
    logits = spread * np.random.default_rng(seed).normal(size=(len(MIXED), vocabulary))
    return logits.astype(np.float32), list(MIXED)


def odd_rows(vocabulary: int, seed: int = 0) -> tuple[np.ndarray, list]:
    """Returns every oddity, each with another of MIXED."""
    rng = np.random.default_rng(seed)
    logits = (2 * rng.normal(size=(len(ODD), vocabulary))).astype(np.float32)
    for row, odd in zip(logits, ODD):
        spoil(row, odd, rng)
    return logits, [MIXED[(i + seed) % len(MIXED)] for i in range(len(ODD))]


def spoil(row: np.ndarray, odd: str, rng: np.random.Generator) -> None:
    some = rng.random(row.size) < 0.5
    match odd:
        case "ties":
            row[:] = np.round(row)
        case "bans":
            row[some] = -np.inf
        case "nan":
            row[some] = np.nan
        case "+inf":
            row[[row.size // 3, row.size - 2]] = np.inf
        case "-inf everywhere":
            row[:] = -np.inf
        case "nan everywhere":
            row[:] = np.nan
        case "equal":
            row[:] = -1.5
        case "far apart":
            row *= 1e37
        case "last":
            row[-1] = row.max() + 4
        case "first":
            row[0] = row.max() + 4


INFINITE, NAN, BELOW_1 = float("inf"), float("nan"), 1 - 2**-24
EXTREMES = (  # what a request may round to in float32, or a row of padding hold
    {"temperature": INFINITE},
    {"temperature": 3.4e38, "top_p": 0.9},
    {"temperature": INFINITE, "min_p": 0.5},
    {"temperature": 1e-45},
    {"temperature": NAN, "top_p": NAN, "min_p": NAN},
    {"temperature": -1.0},
    {"temperature": -INFINITE, "top_k": -1},
    {"min_p": 1.0},
    {"min_p": BELOW_1, "temperature": 3.0},
    {"min_p": 2.0},
    {"min_p": INFINITE, "top_p": 0.5},
    {"min_p": NAN, "top_p": NAN},
    {"min_p": -INFINITE, "top_p": INFINITE},
    {"top_p": 1e-45},
    {"top_p": -INFINITE},
    {"top_p": BELOW_1},
    {"top_k": 2**31 - 1},
    {"top_k": -(2**31)},
)  # fmt: skip


def extreme_rows(vocabulary: int) -> tuple[np.ndarray, list]:
    """Returns a row with bans, and the most likely token not the first, for each of EXTREMES; then with top-k about
    V."""
    asked = [*EXTREMES, *({"top_k": k} for k in (1, vocabulary - 1, vocabulary, vocabulary + 1))]
    logits = np.random.default_rng(5).normal(size=(len(asked), vocabulary)).astype(np.float32)
    logits[:, 0], logits[:, ::3] = -9.0, -np.inf
    return logits, asked


def misses(tokens, finite, logits: np.ndarray, asked: list, seed: int = 0) -> list[str]:
    """Returns what is wrong with the tokens of rows that ask for this, drawn with arguments(asked, seed)."""
    columns = [np.asarray(x) for x in arguments(asked, seed)]
    expected, is_finite = reference.sample(logits, *columns)
    wrong = [f"row {i}: finite is {bool(f)}" for i, f in enumerate(np.asarray(finite)) if f != is_finite[i]]
    for i, (token, right) in enumerate(zip(np.asarray(tokens).tolist(), expected.tolist())):
        if token != right and distance(token, logits[i], *(column[i] for column in columns)) > ROUNDING:
            wrong.append(f"row {i}, {asked[i]}: token {token} in place of {right}")
    return wrong


def distance(token: int, row: np.ndarray, temperature, top_k, top_p, min_p, keys) -> float:
    """Returns how far a token's score is below the best; infinite where it must not be drawn."""
    if not temperature > 0 or not 0 <= token < row.size:
        return np.inf
    scores = reference.scores(reference.clean(row), temperature, top_k, top_p, min_p, keys)
    return scores.max() - scores[token] if scores[token] > -np.inf else np.inf


def jax_arguments(logits: np.ndarray, asked: list, seed: int = 0) -> tuple:
    return jnp.asarray(logits), *arguments(asked, seed)
