"""Checks shapes, dtypes and formats of arguments before anything runs."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.formats import kv_formats
from pallas_kernels.formats.kv_formats import LARGEST_CODE, KVFormat
from pallas_kernels.formats.kv_pages import KVPages, Pages
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.formats.weight_formats import STORED as CODES

FLOATS = ("bfloat16", "float16", "float32", "float64")

# Sizes that kernels over pages support.
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (8, 16, 32, 64, 128)

WHOLE_ROWS = 64  # Hopper's kernels over whole rows take a multiple of so many columns


def bind_shapes(**arrays: tuple[jax.Array, str]) -> dict[str, int]:
    """Binds the letters of shape specs to sizes: bind_shapes(q=(q, "T H D"), cos=(cos, "T D/2")) -> {"T": .., ..}. A
    spec is a list of letters, each optionally with /2 or +1. Raises ValueError where an array disagrees with the
    letters bound before it."""
    sizes: dict[str, int] = {}
    for name, (array, spec) in arrays.items():
        terms = [re.fullmatch(r"([A-Z])(/2|\+1)?", term) for term in spec.split()]
        expected = f"[{', '.join(spec.split())}]"
        if array.ndim != len(terms):
            raise ValueError(f"{name} has shape {array.shape}, expected {expected}")
        for size, term in zip(array.shape, terms):
            assert term is not None, f"bad shape spec {spec!r}"
            letter, change = term.groups()
            implied = {None: size, "/2": 2 * size, "+1": size - 1}[change]
            if sizes.setdefault(letter, implied) != implied:
                known = ", ".join(f"{key}={value}" for key, value in sizes.items() if key in spec)
                raise ValueError(f"{name} has shape {array.shape}, expected {expected} with {known}")
    return sizes


def check_int32(**arrays: jax.Array) -> None:
    """Raises ValueError for an index array that isn't int32."""
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}, expected int32")


def check_floats(**arrays: jax.Array) -> None:
    """Raises ValueError unless all arrays have one and the same dtype among bf16, f16, f32 and f64."""
    (first, leader), *rest = arrays.items()
    if str(leader.dtype) not in FLOATS:
        raise ValueError(f"{first} has dtype {leader.dtype}, expected one of {', '.join(FLOATS)}")
    for name, array in rest:
        if array.dtype != leader.dtype:
            raise ValueError(f"{name} has dtype {array.dtype}, expected {leader.dtype} as {first} has")


def check_norm(norm: jax.Array | None, x: jax.Array) -> None:
    """Raises ValueError unless there is no norm of x [..., K], or its weight is [K] in x's dtype."""
    if norm is not None and (norm.shape, norm.dtype) != (x.shape[-1:], x.dtype):
        raise ValueError(f"norm is {norm.dtype}{list(norm.shape)}, expected {x.dtype}[{x.shape[-1]}]")


def check_out_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns `dtype` as one. Raises ValueError unless it is bf16, f16, f32 or f64."""
    dtype = np.dtype(dtype)
    if str(dtype) not in FLOATS:
        raise ValueError(f"out_dtype is {dtype}, expected one of {', '.join(FLOATS)}")
    return dtype


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raises ValueError unless each KV head serves the same number of query heads."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads: expected a multiple")


def check_listed(*arguments: tuple[str, object, tuple[object, ...]], backend: str = "mosaic") -> None:
    """Raises NotImplementedError for the first argument that a backend does not support. Each argument is a name for
    the message, a value, and the supported values."""
    for what, value, supported in arguments:
        if value not in supported:
            names = ", ".join(map(str, supported))
            raise NotImplementedError(f"{what} {value} is not supported by backend {backend}, which does {names}")


def check_paged(dtype: str, head_dim: int, pages: KVPages, stored: tuple[str, ...], backend: str = "mosaic") -> None:
    """Raises NotImplementedError, which says what is supported, for queries and pages that a kernel lacks. `stored` are
    the codes of K and V that the kernel reads or writes."""
    check_listed(
        ("dtype", dtype, ("bfloat16", "float16")),
        ("head dim", head_dim, HEAD_DIMS),
        ("page size", pages.k.page_size, PAGE_SIZES),
        ("K stored as", pages.k.format.codes, stored),
        ("V stored as", pages.v.format.codes, stored),
        backend=backend,
    )


def check_whole_rows(letter: str, dtype: str, rows: int, width: int, largest: int) -> None:
    """Raises NotImplementedError for what Hopper's kernels over whole rows [T, `letter`] lack, naming what they do."""
    supported = "bfloat16", "float16"
    if dtype not in supported:
        raise NotImplementedError(
            f"dtype {dtype} is not supported by backend mosaic, which does {', '.join(supported)}"
        )
    if width % WHOLE_ROWS or not 128 <= width <= largest:
        raise NotImplementedError(
            f"{letter}={width} is not supported by backend mosaic, which does multiples of {WHOLE_ROWS} from 128 to "
            f"{largest}"
        )
    if rows < 1:
        raise NotImplementedError("T=0 is not supported by backend mosaic, which does at least one row")


def check_window(window: int | None) -> None:
    """Raises ValueError for a window that sees nothing: every query sees its own key."""
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, expected at least 1, or None for no window")


def check_pages(pages: KVPages, num_kv_heads: int | None, head_dim: int) -> None:
    """Raises ValueError unless K and V fit their formats, each other, `num_kv_heads` (None: any) and `head_dim`."""
    shape, layers = pages.k.values.shape, pages.k.layers
    if pages.v.layers != layers or shape[0] % layers:
        raise ValueError(f"{shape[0]} pages are of {layers} layers of K and {pages.v.layers} of V, expected N of each")
    if num_kv_heads is not None and shape[1:2] != (num_kv_heads,):
        raise ValueError(f"pages.k.values has shape {shape}, expected [L N, K, P, D] with K={num_kv_heads}")
    for name, part in (("k", pages.k), ("v", pages.v)):
        _check_pool(f"pages.{name}", part, shape[:3], head_dim)


def _check_format(name: str, fmt: KVFormat, head_dim: int) -> None:
    """Raises NotImplementedError for a format that pages don't have. Raises ValueError for one of the caller's own that
    does not fit the head dim."""
    if type(fmt) is not KVFormat:
        if not fmt.fits(head_dim):
            raise ValueError(f"{name} is stored as {fmt}, which does not fit the head dim {head_dim}")
        return
    floats = (*kv_formats.FLOATS.values(), "float8_e5m2")
    if fmt.group is None:
        known = fmt.dtype in floats and not fmt.zero_point
    else:
        known = fmt.dtype in LARGEST_CODE and fmt.group % 8 == 0 and head_dim % fmt.group == 0
    if not known:
        raise NotImplementedError(
            f"{name} is stored as {fmt}, which no backend reads; formats: {', '.join(floats)}, "
            f"int8 and int4 in groups of a multiple of 8 that divides the head dim {head_dim}"
        )


def _check_pool(name: str, pool: Pages, leading: tuple[int, ...], head_dim: int) -> None:
    _check_format(name, pool.format, head_dim)
    row = pool.format.row(head_dim)
    if pool.values.shape != (*leading, row):
        raise ValueError(
            f"{name}.values has shape {pool.values.shape}, expected {(*leading, row)} for head dim {head_dim}"
        )
    if pool.values.dtype != pool.format.storage_dtype:
        raise ValueError(
            f"{name}.values has dtype {pool.values.dtype}, {pool.format} stores {pool.format.storage_dtype}"
        )
    if (pool.scales is None) != (pool.format.group is None):
        raise ValueError(f"{name} has {'no ' if pool.scales is None else ''}scales, which {pool.format} contradicts")
    if pool.scales is not None:
        num_pages, heads, page_size = leading
        expected = (num_pages, heads, page_size * pool.format.numbers(head_dim))
        if pool.scales.shape != expected or pool.scales.dtype != jnp.float16:
            raise ValueError(
                f"{name}.scales is {pool.scales.dtype}{list(pool.scales.shape)}, expected float16{list(expected)}"
            )


def check_weight(w: QuantizedWeight) -> None:
    """Raises ValueError if a weight's arrays do not have the shapes and dtypes of its format. Raises
    NotImplementedError for unknown codes. Float scales may be wider than stored ones, as they are while they are
    learned."""
    fmt, (rows, columns) = w.format, w.values.shape
    if fmt.codes not in CODES:
        raise NotImplementedError(f"no backend reads codes {fmt.codes!r}; codes: {', '.join(CODES)}")
    groups = None if fmt.group is None else columns * (2 if fmt.packed else 1) // fmt.group
    shape = (rows,) if groups is None else (groups, rows)
    wide = (
        not fmt.double_quant
        and fmt.scale_codes is None
        and str(getattr(w.scales, "dtype", None)) in ("float32", "float64")
    )
    scales = str(w.scales.dtype if wide else fmt.scale_dtype)
    expected: dict[str, tuple[jax.Array | None, str | None, tuple[int, ...]]] = {
        "values": (w.values, str(fmt.storage_dtype), w.values.shape),
        "scales": (w.scales, scales, shape),
        "zeros": (w.zeros, "int8" if fmt.zero_point else None, shape),
    }
    if fmt.scale_codes is not None:
        expected["scale_steps"] = (w.scale_steps, "float32" if fmt.scale_codes == "e4m3" else None, (rows,))
    for name, (array, dtype, wanted) in expected.items():
        found = None if array is None else (str(array.dtype), array.shape)
        if found != (None if dtype is None else (dtype, wanted)):
            said = "none" if found is None else f"{found[0]}{list(found[1])}"
            right = "none" if dtype is None else f"{dtype}{list(wanted)}"
            raise ValueError(f"w.{name} is {said}, expected {right} for {fmt}")


def check_logits(softcap: float | None, sinks: jax.Array | None, num_heads: int) -> dict[str, Any]:
    """Returns these options of attention that are given. Raises ValueError for a cap that is not positive, and for
    sinks that are not one number a query head."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, expected a positive number")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks has shape {sinks.shape}, expected [{num_heads}]")
    given = {"softcap": softcap, "sinks": sinks}
    return {name: value for name, value in given.items() if value is not None}
