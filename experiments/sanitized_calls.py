"""Calls kernels for compute-sanitizer, each on small inputs, and returns the formula's result beside."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Result = tuple[Any, Any]  # a kernel's, and the formula's
FORMATS = ("bf16", "fp8", "int8-g8", "int4-g32", "int4-g32-zp", "int8-g128-zp")  # of K and V
ROTATED = ("bf16-h", "int4-g32-h", "int8-g8-zp-h")  # of K and V; Triton has none
WIDTHS: dict[str, Any] = {"heads": (4, 2), "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}


def attend_decode(kv: str, backend: str, **logits: Any) -> Result:
    from pallas_kernels.decode_attention import decode_attention, reference
    from pallas_kernels.decode_attention.cases import Case

    case = Case(lengths=(130, 1, 0, 64, 1100), k_format=kv, v_format=kv, window=None, **WIDTHS)
    inputs, scale = case.inputs(), case.scale
    out = decode_attention(*inputs, scale=scale, backend=backend, **logits)
    return out, reference.decode_attention(*inputs, scale, None, **logits)


def attend_segments(kv: str, backend: str) -> Result:
    """Attends with four rows per sequence, in a chain."""
    from pallas_kernels.decode_attention import decode_attention, reference
    from pallas_kernels.decode_attention.cases import Case

    case = Case(lengths=(130, 4, 0, 64, 1100), k_format=kv, v_format=kv, width=4, **WIDTHS)
    inputs, scale = case.inputs(), case.scale
    return decode_attention(*inputs, scale=scale, backend=backend), reference.decode_attention(*inputs, scale, None)


def attend_prefill(kv: str, backend: str, **logits: Any) -> Result:
    from pallas_kernels.prefill_attention import prefill_attention, reference
    from pallas_kernels.prefill_attention.cases import Case

    lengths: dict[str, Any] = {"q_lens": (37, 0, 1, 130), "kv_lens": (150, 9, 129, 130), "unused": 5}
    case = Case(k_format=kv, v_format=kv, window=None, **lengths, **WIDTHS)
    inputs, scale = case.inputs(), case.scale
    out = prefill_attention(*inputs, scale=scale, backend=backend, **logits)
    return out, reference.prefill_attention(*inputs, scale, None, **logits)


def capped(attend: Callable[..., Result]) -> Callable[[str, str], Result]:
    """Returns the call with capped logits and sinks."""

    def run(kv: str, backend: str) -> Result:
        import jax.numpy as jnp

        return attend(kv, backend, softcap=2.0, sinks=jnp.arange(4.0))

    return run


def update_cache(kv: str, backend: str) -> Result:
    """Returns the rotated Q. Tests compare what is stored bitwise."""
    from pallas_kernels.cache_update import cache_update, reference
    from pallas_kernels.cache_update.cases import Case

    arguments: tuple[Any, ...] = Case(rows=33, dropped=2, num_pages=6, k_format=kv, v_format=kv, **WIDTHS).inputs()
    return cache_update(*arguments, backend=backend)[0], reference.cache_update(*arguments)[0]


def move(kv: str, backend: str) -> Result:
    """Returns the stored K and V of all layers after accepted drafts have moved to their places."""
    import jax
    import numpy as np

    from pallas_kernels.move_tokens import move_tokens, reference
    from pallas_kernels.move_tokens.cases import Case

    case = Case(rows=5, moves=4, layers=2, num_kv_heads=2, head_dim=128, page_size=16, k_format=kv, v_format=kv)
    inputs = case.inputs()
    results = move_tokens(*inputs, backend=backend), reference.move_tokens(*inputs)
    return tuple(
        np.concatenate([np.asarray(leaf).astype(np.float64).reshape(-1) for leaf in jax.tree.leaves(pools)])
        for pools in results
    )  # type: ignore[return-value]


def norm(kind: str, backend: str) -> Result:
    from pallas_kernels.norm_quant import norm_quant, reference
    from pallas_kernels.norm_quant.cases import Case

    case = Case(9, 1408, "bfloat16", None if kind == "none" else kind)
    (x, weight, residual), options = case.inputs(), case.options()
    expected = reference.norm_quant(x, weight, residual=residual, **options)[0]
    return plain(norm_quant(x, weight, residual=residual, **options, backend=backend)[0]), plain(expected)


def activate(kind: str, backend: str) -> Result:
    from pallas_kernels.silu_mul_quant import reference, silu_mul_quant
    from pallas_kernels.silu_mul_quant.cases import Case

    case = Case(9, 1408, "bfloat16", None if kind == "none" else kind)
    gate_up = case.inputs()
    out, expected = silu_mul_quant(gate_up, kind=case.kind, backend=backend), reference.silu_mul_quant
    return plain(out), plain(expected(gate_up, kind=case.kind))


def plain(rows: Any) -> Any:
    """Returns rows as floats, quantized or not."""
    import numpy as np

    from pallas_kernels.formats.quantized_rows import QuantizedRows

    if not isinstance(rows, QuantizedRows):
        return rows
    return np.asarray(rows.values).astype(np.float64) * np.asarray(rows.scales)[:, None]


def multiply_gated(rows: str, backend: str) -> Result:
    from pallas_kernels.swiglu import reference, swiglu
    from pallas_kernels.swiglu.cases import Case

    x, w = Case((int(rows),), 320, 1024, "bfloat16").inputs()
    return swiglu(x, w, backend=backend), reference.swiglu(x, w)


def multiply(rows: str, backend: str) -> Result:
    from pallas_kernels.matmul import matmul, reference
    from pallas_kernels.matmul.cases import Case

    x, w, added = Case((int(rows),), 320, 1024, "bfloat16", bias=True, residual=True).inputs()
    bias, residual = added["bias"], added["residual"]
    return matmul(x, w, bias=bias, residual=residual, backend=backend), reference.matmul(x, w, bias, residual)


def multiply_int8(rows: str, backend: str) -> Result:
    from pallas_kernels.int8_matmul import int8_matmul

    return multiply_scaled(int8_matmul, "int8", rows, backend)


def multiply_fp8(rows: str, backend: str) -> Result:
    from pallas_kernels.fp8_matmul import fp8_matmul

    return multiply_scaled(fp8_matmul, "float8_e4m3fn", rows, backend)


def multiply_scaled(product: Callable[..., Any], operand: str, rows: str, backend: str) -> Result:
    from pallas_kernels.scaled_matmul.cases import Case
    from pallas_kernels.scaled_matmul.reference import scaled_matmul

    inputs: tuple[Any, ...] = Case(int(rows), 320, 1024, operand, bias=True, residual=True).inputs()
    return product(*inputs[:4], bias=inputs[4], residual=inputs[5], backend=backend), scaled_matmul(*inputs)


def quantize_and_multiply(rows: str, backend: str) -> Result:
    """Returns the matmul of rows that it norms and quantizes itself."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.norm_quant.reference import normalize
    from pallas_kernels.scaled_matmul.cases import Case
    from pallas_kernels.scaled_matmul.plain_rows import of_plain_rows
    from pallas_kernels.scaled_matmul.reference import scaled_matmul

    codes, w, _, w_scale, bias, residual = Case(int(rows), 320, 1024, "int8", bias=True, residual=True).inputs()
    assert codes is not None
    assert w is not None
    assert w_scale is not None
    x, norm = (jnp.asarray(array, "bfloat16") for array in (codes, np.ones(1024)))
    added: dict[str, Any] = {"bias": bias, "residual": residual}
    out = of_plain_rows(x, w, w_scale, norm=norm, eps=1e-5, **added, backend=backend)
    ones = np.ones(len(x))
    return out, scaled_matmul(normalize(np.asarray(x), 1e-5), w, ones, w_scale, bias, residual)


def multiply_codes(which: str, backend: str) -> Result:
    """Returns a matmul by codes. `which`: the weight's format and the rows of x."""
    from pallas_kernels.weight_only_matmul import reference, weight_only_matmul

    x, w, bias, residual = codes(which)
    out = weight_only_matmul(x, w, bias=bias, residual=residual, backend=backend)
    return out, reference.weight_only_matmul(x, w, bias, residual)


def multiply_codes_by_warp(which: str, backend: str) -> Result:
    """Returns the same by matmuls of single warps, cut so that their ring wraps around."""
    from pallas_kernels.weight_only_matmul import mosaic_sm90, reference, weight_only_matmul
    from pallas_kernels.weight_only_matmul.config import Config

    x, w, bias, residual = codes(which)
    if backend == "mosaic":
        config = Config(tokens=-(-len(x) // 8) * 8, fold=1, warpgroups=1, stages=3, by_warp=True)
        out = mosaic_sm90.weight_only_matmul(x, w, bias, residual, x.dtype, config=config)
    else:
        out = weight_only_matmul(x, w, bias=bias, residual=residual, backend=backend)
    return out, reference.weight_only_matmul(x, w, bias, residual)


def codes(which: str) -> tuple[Any, ...]:
    """Returns x, a weight, bias and residual of a matmul by codes."""
    from pallas_kernels.weight_only_matmul.cases import Case

    name, _, rows = which.partition(":")
    return Case((int(rows),), 320, 1024, name, bias=True, residual=True).inputs()


def multiply_groups(which: str, backend: str) -> Result:
    """Returns products of groups of rows. `which`: the weights' format and the rows of x, of which some have no
    group."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.formats.quantized_weights import decode, encode
    from pallas_kernels.formats.weight_formats import parse_weight_format
    from pallas_kernels.ragged_matmul import ragged_matmul, reference

    name, _, rows = which.partition(":")
    half, rng = int(rows) // 2, np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(size, 1024)), "bfloat16") for size in (2 * half, 3 * 320))
    codes = None if name == "bf16" else encode(w, parse_weight_format(name))
    blocks, sizes = (w if codes is None else decode(codes)).reshape(3, 320, 1024), (half, 0, max(half - 3, 0))
    out = ragged_matmul(x, w if codes is None else codes, jnp.asarray(sizes, jnp.int32), backend=backend)
    return out, reference.ragged_matmul(x, np.asarray(blocks), sizes)


def route_tokens(which: str, backend: str) -> Result:
    """Returns rows at the places of tokens' experts, and their shares. `which`: tokens, experts, and experts of each
    token."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.route import reference, route

    tokens, experts, chosen = map(int, which.split(":"))
    rng = np.random.default_rng(0)
    scores, x = (jnp.asarray(rng.normal(size=(tokens, size)), "bfloat16") for size in (experts, 320))
    made = route(scores, x, chosen=chosen, normalize=True, backend=backend)
    routes = reference.choose(scores, chosen)
    order, _, _, which_route = reference.sort_rows(routes, experts)
    shares = np.take_along_axis(reference.shares_of(scores, routes, True), which_route, axis=1)
    return jnp.append(made.rows.astype(jnp.float32), made.shares), np.append(np.asarray(x, np.float64)[order], shares)


def multiply_by_row(which: str, backend: str) -> Result:
    """Returns products of rows with matrices of their own. `which`: K and the rows of x."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.row_matmul import reference, row_matmul

    k, m = map(int, which.split(":"))
    rng, group = np.random.default_rng(0), np.sort(np.resize([0, 1, -1, 2], m))
    x, w = (jnp.asarray(rng.normal(size=size), "bfloat16") for size in ((m, 1, k), (2, 3, 512, k)))
    out = row_matmul(x, w, jnp.int32(1), jnp.asarray(group, jnp.int32), backend=backend)
    return out, reference.row_matmul(x, w[1], group, (512,))


def multiply_low_rank(which: str, backend: str) -> Result:
    """Returns products of rows with two matrices of their own. `which`: the rank and the rows of x."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.row_matmul import low_rank, reference

    r, m = map(int, which.split(":"))
    rng, group = np.random.default_rng(0), np.resize([0, 1, -1, 2], m)
    sizes, parts = ((m, 1280), (2, 3, 2 * r, 1280), (2, 3, 1024, r)), (768, 256)
    x, a, b = (jnp.asarray(rng.normal(size=size) / size[-1] ** 0.5, "bfloat16") for size in sizes)
    out = low_rank(x, a, b, jnp.int32(1), jnp.asarray(group, jnp.int32), parts=parts, backend=backend)
    low = reference.row_matmul(np.asarray(x)[:, None], a[1], group, (2 * r,)).reshape(m, 2, r)
    return out, reference.row_matmul(low, b[1], group, parts)


def draw(vocabulary: str, backend: str) -> Result:
    """Returns tokens of rows with all filters."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.sample import reference, sample
    from pallas_kernels.sample.cases import MIXED, arguments

    logits = 3 * np.random.default_rng(0).normal(size=(len(MIXED), int(vocabulary))).astype(np.float32)
    asked = arguments(list(MIXED))
    return sample(jnp.asarray(logits), *asked, backend=backend)[0], reference.sample(logits, *asked)[0]


@dataclass(frozen=True)
class Kernel:
    run: Callable[[str, str], Result]  # runs a case on a backend: its result and the formula's
    cases: tuple[str, ...]
    backends: tuple[str, ...] = ("mosaic", "triton")


KERNELS = {
    "decode_attention": Kernel(attend_decode, FORMATS),
    "decode_attention of segments": Kernel(attend_segments, ("bf16", "int8-g8")),
    "prefill_attention": Kernel(attend_prefill, FORMATS),
    "decode_attention with sinks and a softcap": Kernel(capped(attend_decode), ("bf16", "int8-g8")),
    "prefill_attention with sinks and a softcap": Kernel(capped(attend_prefill), ("bf16", "int8-g8")),
    "cache_update": Kernel(update_cache, FORMATS),
    "decode_attention over rotated K and V": Kernel(attend_decode, ROTATED, ("mosaic",)),
    "prefill_attention over rotated K and V": Kernel(attend_prefill, ROTATED, ("mosaic",)),
    "cache_update of rotated K and V": Kernel(update_cache, ROTATED, ("mosaic",)),
    "move_tokens": Kernel(move, ("bf16", "int4-g32"), ("mosaic",)),
    "norm_quant": Kernel(norm, ("none", "int8", "fp8")),
    "silu_mul_quant": Kernel(activate, ("int8", "fp8")),
    "swiglu": Kernel(multiply_gated, ("1", "9", "64"), ("mosaic",)),
    "matmul": Kernel(multiply, ("1", "8", "64"), ("mosaic",)),
    "int8_matmul": Kernel(multiply_int8, ("1", "17", "200")),
    "fp8_matmul": Kernel(multiply_fp8, ("17", "200")),
    "norm_quant and int8_matmul": Kernel(quantize_and_multiply, ("1", "9"), ("mosaic",)),
    "weight_only_matmul": Kernel(
        multiply_codes,
        (
            *("w4a16-g128:1", "w4a16-g128:9", "nf4:1", "nf4:33"),
            *("w8a16:1", "w8a16:5", "w8a16:70", "w8a16-g32-zp:3", "fp8-weight:8"),
        ),
    ),
    "weight_only_matmul by warp": Kernel(
        multiply_codes_by_warp, ("w4a16-g128:9", "w4a16-g32-zp:5", "nf4:16"), ("mosaic",)
    ),
    "ragged_matmul": Kernel(multiply_groups, ("bf16:70", "w4a16-g128:70", "mxfp4-weight:8")),
    "ragged_matmul by row": Kernel(multiply_groups, ("bf16:2", "w4a16-g128:2", "mxfp4-weight:2"), ("mosaic",)),
    "route": Kernel(route_tokens, ("1:128:8", "33:60:4", "150:8:2"), ("mosaic",)),
    "row_matmul": Kernel(multiply_by_row, ("16:9", "1024:9", "16:300"), ("mosaic",)),
    "low_rank": Kernel(multiply_low_rank, ("16:9", "64:70"), ("mosaic",)),
    "sample": Kernel(draw, ("512", "4100")),
}
