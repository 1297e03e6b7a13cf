"""Reads and writes the paged layout slot by slot in numpy, for the references: written from the layout alone. It shares
nothing with kv_pages.py but its dataclasses. It also catches what shapes cannot tell: indices out of range."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.formats.kv_pages import KVPages, Pages


def to_numpy(pages: KVPages) -> KVPages:
    """Returns a writable host copy."""
    return jax.tree.map(np.array, pages)


def of_layer(pages: KVPages, layer: int | None = None) -> KVPages:
    """Returns views of one layer's pages in a host copy. The default is the layer that the pages stand for."""

    def own(part: Pages) -> Pages:
        size = len(part.values) // part.layers
        first = size * int((0 if part.layer is None else part.layer) if layer is None else layer)
        scales = None if part.scales is None else part.scales[first : first + size]
        return Pages(part.values[first : first + size], scales, part.format)

    return KVPages(own(pages.k), own(pages.v))


def rotated(x: np.ndarray) -> np.ndarray:
    """Multiplies x [D] by the Hadamard matrix: entry i, j is -1 to the number of bits that i and j share."""
    size = len(x) & -len(x)
    i = np.arange(size)
    signs = 1.0 - 2.0 * (np.bitwise_count(i[:, None] & i[None, :]) % 2)
    return (x.reshape(-1, size) @ signs / np.sqrt(size)).reshape(-1)


def read_row(pages: Pages, page: int, head: int, offset: int) -> np.ndarray:
    """Returns one token's K or V of one head, as stored in a host copy: float64 [D]."""
    x = _read_row(pages, page, head, offset)
    return rotated(x) if pages.format.hadamard else x


def _read_row(pages: Pages, page: int, head: int, offset: int) -> np.ndarray:
    row = np.asarray(pages.values)[page, head, offset]
    group = pages.format.group
    if pages.format.dtype == "float8_e4m3fn":
        row = row.view(jnp.float8_e4m3fn)
    if group is None:
        return row.astype(np.float64)
    codes = row.astype(np.int64)
    if pages.format.dtype == "int4":  # two's complement nibbles, the low one first
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1)
        codes = np.where(codes > 7, codes - 16, codes)
    groups = len(codes) // group
    numbers = np.asarray(pages.scales)[page, head].astype(np.float64)
    if pages.format.zero_point:  # a token's scales, then its zeros, which are what the lowest code stands for
        scales, zeros = numbers.reshape(-1, 2, groups)[offset]
        lowest = {"int8": -128, "int4": -8}[pages.format.dtype]
        return (codes - lowest) * np.repeat(scales, group) + np.repeat(zeros, group)
    return codes * np.repeat(numbers[offset * groups : (offset + 1) * groups], group)


def read_sequence(pages: Pages, table: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Returns tokens start..stop of the sequence whose page table is `table`, from a host copy: float64 [tokens, K, D].
    Raises ValueError where the table is too short or names a page that doesn't exist."""
    num_pages, num_heads, page_size = pages.values.shape[:3]
    if stop > len(table) * page_size:
        raise ValueError(f"{stop} keys do not fit {len(table)} pages of {page_size} tokens")
    rows = []
    for token in range(start, stop):
        page = int(table[token // page_size])
        if not 0 <= page < num_pages:
            raise ValueError(f"token {token} is in page {page}, but the pool has {num_pages} pages")
        rows.append([read_row(pages, page, head, token % page_size) for head in range(num_heads)])
    return np.array(rows, np.float64)


def sinks_of(sinks: ArrayLike | None, num_heads: int) -> np.ndarray:
    """Returns the sinks float64 [H], where none is one of -inf."""
    return np.full(num_heads, -np.inf) if sinks is None else np.asarray(sinks).astype(np.float64)


def attended(logits: np.ndarray, values: np.ndarray, softcap: float | None, sink: float) -> np.ndarray:
    """Returns the sum float64 [D] of values [T, D] by the softmax of logits [T], capped if so, and of a sink."""
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    top = max(logits.max(), sink)
    weights = np.exp(logits - top)
    return weights @ values / (weights.sum() + np.exp(sink - top))


def write_row(pages: Pages, page: int, head: int, offset: int, x: np.ndarray) -> None:
    """Stores x [D] at one slot of a host copy, by the format's definition."""
    if pages.format.hadamard:
        x = rotated(x)
    values, group = np.asarray(pages.values), pages.format.group  # views: the host copy itself changes
    if pages.format.dtype == "float8_e4m3fn":
        x = np.maximum(np.minimum(x, 448.0), -448.0).astype(jnp.float8_e4m3fn)
        values[page, head, offset] = x.view(np.uint8)
        return
    if group is None:
        values[page, head, offset] = x.astype(values.dtype)
        return
    scales = np.asarray(pages.scales)
    largest = {"int8": 127, "int4": 7}[pages.format.dtype]
    groups = len(x) // group
    codes: list[int] = []
    for g in range(groups):
        part = x[g * group : (g + 1) * group]
        if pages.format.zero_point:
            least = part.min() if abs(part.min()) >= 2.0**-14 else 0.0
            zero = np.float16(min(max(least, -65504.0), 65504.0))
            scale = np.float16(min(max((part.max() - np.float64(zero)) / (2 * largest + 1), 2.0**-14), 65504.0))
            scales[page, head, 2 * offset * groups + g] = scale
            scales[page, head, (2 * offset + 1) * groups + g] = zero
            steps = [int(np.rint((value - np.float64(zero)) / np.float64(scale))) for value in part]
            codes += [min(max(step, 0), 2 * largest + 1) - largest - 1 for step in steps]
            continue
        scale = np.float16(min(max(np.abs(part).max() / largest, 2.0**-14), 65504.0))
        scales[page, head, offset * groups + g] = scale
        codes += [int(min(max(np.rint(value / np.float64(scale)), -largest), largest)) for value in part]
    if pages.format.dtype == "int4":
        codes = [(codes[i] & 15) + 16 * (codes[i + 1] & 15) for i in range(0, len(codes), 2)]
    values[page, head, offset] = codes
