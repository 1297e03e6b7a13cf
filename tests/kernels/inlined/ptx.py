"""Runs PTX in numpy: each instruction by its definition, for all threads at once."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.kernels.inlined.memory import Pointer, Run

Value = Any  # an array [threads], or a Pointer


def as_bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8)


_TOKENS = re.compile(r"\[[^\]]*\]|\$\d+|0x[0-9a-fA-F]+|-?\d+|[A-Za-z_]\w*")


def parse(text: str) -> list[Callable[[Run, dict[str, Value]], None]]:
    lines = (re.sub(r"\s+", " ", line).strip(" {}") if ".reg" in text else line.strip() for line in text.split(";"))
    return [_statement(line) for line in lines if line.strip(" {}") and not line.lstrip(" {").startswith(".reg")]


def _statement(line: str) -> Callable[[Run, dict[str, Value]], None]:
    name, _, rest = line.strip().partition(" ")
    predicate = None
    if name.startswith("@"):
        predicate, (name, _, rest) = name[1:], rest.strip().partition(" ")
    if name == "mov.b32" and rest.startswith("{"):
        name += ".halves"
    tokens = _TOKENS.findall(rest)
    found = [(f, n) for pattern, f, n in INSTRUCTIONS if re.fullmatch(pattern, name)]
    if not found:
        raise NotImplementedError(f"numpy does not know {line}")
    instruction, targets = found[0]

    def value(token: str, run: Run, names: dict[str, Value]) -> Value:
        if token.startswith("["):
            place, _, more = token[1:-1].partition("+")
            return names[place].moved(int(more or 0))
        return names[token] if token in names else run.full(int(token, 0) & 0xFFFFFFFF, np.uint32)

    def run_it(run: Run, names: dict[str, Value]) -> None:
        values = [value(token, run, names) for token in tokens[targets:]]
        with np.errstate(all="ignore"), run.only(names[predicate]) if predicate else contextlib.nullcontext():
            out = instruction(run, name, *values)
        names.update(zip(tokens[:targets], out if targets > 1 else [out]))

    return run_it


def _pairs(x: np.ndarray, name: str) -> np.ndarray:
    """Returns float64 [threads, 2] of a word's halves. XLA's threads take subnormal float32 for zero, so those of
    bfloat16 are made of their bits."""
    if "bf16" not in name:
        return as_bytes(x).view(np.float16).astype(np.float64)
    bits = as_bytes(x).view(np.uint16)
    subnormal = np.where(bits & 0x8000, -1.0, 1.0) * (bits & 0x7F) * 2.0**-133
    return np.where(bits & 0x7F80, bits.view(jnp.bfloat16).astype(np.float64), subnormal)


def _word(pairs: np.ndarray, name: str) -> np.ndarray:
    return as_bytes(pairs.astype(jnp.bfloat16 if "bf16" in name else np.float16)).view(np.uint32)[:, 0]


def _of_pairs(f: Callable[..., np.ndarray]) -> Any:
    """Computes exactly, then rounds once."""
    return lambda run, name, *xs: _word(f(*(_pairs(x, name) for x in xs)), name)


def _permute(run: Run, name: str, a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = np.concatenate([as_bytes(a), as_bytes(b)], axis=1)
    assert not (selector & 0x8888).any()
    chosen = [both[np.arange(len(a)), selector >> 4 * i & 7] for i in range(4)]
    return np.stack(chosen, axis=1).view(np.uint32)[:, 0]


def _logic(run: Run, name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    out = np.zeros_like(a)
    for i in range(8):
        if table[0] >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _mma(run: Run, name: str, *xs: np.ndarray) -> list[np.ndarray]:
    """Multiplies by lane (g = lane / 4, t = lane % 4). A has rows g and g + 8, columns 2t, 2t + 1, and 8 on. B has rows
    2t, 2t + 1, and 8 on, column g. C has rows g and g + 8, columns 2t and 2t + 1."""
    kind, warps = name.split(".")[-2], len(run.threads) // 32
    g, t = np.arange(32) // 4, np.arange(32) % 4
    a, b, c = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
    for i, x in enumerate(xs[:6]):
        halves = _pairs(x, kind).reshape(warps, 32, 2)
        for j in range(2):
            if i < 4:
                a[:, g + i % 2 * 8, 2 * t + j + i // 2 * 8] = halves[..., j]
            else:
                b[:, 2 * t + j + (i - 4) * 8, g] = halves[..., j]
    for i, x in enumerate(xs[6:]):
        c[:, g + i // 2 * 8, 2 * t + i % 2] = x.reshape(warps, 32)
    c += a @ b
    return [c[:, g + i // 2 * 8, 2 * t + i % 2].reshape(-1).astype(np.float32) for i in range(4)]


def _dot_bytes(run: Run, name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Adds the products of signed bytes to c."""
    left, right = (as_bytes(x).view(np.int8).astype(np.int32) for x in (a, b))
    return (c.view(np.int32) + (left * right).sum(axis=1, dtype=np.int32)).view(np.uint32)


def _transpose(run: Run, name: str, x: np.ndarray) -> np.ndarray:
    halves = as_bytes(x).view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2)
    return np.ascontiguousarray(halves).reshape(-1, 2).view(np.uint32)[:, 0]


def _load_global(run: Run, name: str, place: Pointer) -> Any:
    count = int(found[1]) if (found := re.search(r"\.v(\d)", name)) else 1
    dtype = {"u32": np.uint32, "u16": np.uint16, "s8": np.int8}[name.rpartition(".")[2]]
    size = count * np.dtype(dtype).itemsize
    values = run.load(place, size, size).view(dtype)
    if dtype is np.int8:
        values = values.astype(np.int32).view(np.uint32)
    return values[:, 0] if count == 1 else list(values.T)


def _from_e4m3(run: Run, name: str, x: np.ndarray) -> np.ndarray:
    return _word(as_bytes(x)[:, :2].copy().view(jnp.float8_e4m3fn).astype(np.float64), "f16")


INSTRUCTIONS: list[tuple[str, Any, int]] = [  # by name: what it gives, and how many targets it has
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(b?f16)\.\1\.f32", _mma, 4),
    (r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", _transpose, 1),
    (r"dp4a\.s32\.s32", _dot_bytes, 1),
    (r"prmt\.b32", _permute, 1),
    (r"lop3\.b32", _logic, 1),
    (r"mov\.b32", lambda run, name, x: x, 1),
    (r"mov\.b32\.halves", lambda run, name, x: [x & 0xFFFF, x >> 16], 2),
    (r"shl\.b32", lambda run, name, x, by: x << by, 1),
    (r"shr\.b32", lambda run, name, x, by: x >> by, 1),
    (r"xor\.b32", lambda run, name, x, y: x ^ y, 1),
    (r"max\.u32", lambda run, name, x, y: np.maximum(x, y), 1),
    (r"min\.u32", lambda run, name, x, y: np.minimum(x, y), 1),
    (r"max\.NaN\.f32", lambda run, name, x, y: np.maximum(x, y), 1),
    (r"sub(\.rn)?\.b?f16x2", _of_pairs(np.subtract), 1),
    (r"mul(\.rn)?\.b?f16x2", _of_pairs(np.multiply), 1),
    (r"max\.b?f16x2", _of_pairs(np.fmax), 1),
    (r"fma\.rn\.b?f16x2", _of_pairs(lambda a, b, c: a * b + c), 1),
    (r"fma\.rn\.f32", lambda run, name, a, b, c: (a.astype(np.float64) * b + c).astype(np.float32), 1),
    (r"ex2\.approx\.f32", lambda run, name, x: np.exp2(x), 1),
    (r"rcp\.approx\.ftz\.f32", lambda run, name, x: 1 / x, 1),
    (r"lg2\.approx\.ftz\.f32", lambda run, name, x: np.log2(x), 1),
    (r"cvt\.rn\.f16x2\.e4m3x2", _from_e4m3, 1),
    (r"cvt\.rn\.b?f16x2\.f32", lambda run, name, high, low: _word(np.stack([low, high], axis=1), name), 1),
    (r"shfl\.sync\.idx\.b32", lambda run, name, x, lane, *_: x[np.arange(len(x)) // 32 * 32 + lane % 32], 1),
    (r"setp\.lt\.u32", lambda run, name, x, y: x < y, 1),
    (r"st\.global\.v2\.b32", lambda run, name, at, *xs: run.store(at, as_bytes(np.stack(xs, axis=1)), 8), 0),
    (r"ld\.global\.nc\.(L1::no_allocate\.L2::128B\.)?v4\.\w+", _load_global, 4),
    (r"ld\.global\.nc\.v2\.\w+", _load_global, 2),
    (r"ld\.global\.nc\.\w+", _load_global, 1),
    (r"bar\.sync", lambda run, name, *_: None, 0),  # of a warpgroup
]
