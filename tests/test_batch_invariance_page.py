"""At which numbers of rows a row's bits change, as docs/sampling.md says and as kernels are chosen."""

from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path

import jax
import pytest

from jllm.files.hf_config import load_config
from pallas_kernels.backends import choose
from pallas_kernels.formats.weight_formats import WeightFormat, parse_weight_format
from pallas_kernels.matmul.api import BACKENDS as PRODUCT
from pallas_kernels.swiglu.api import BACKENDS as GATED
from pallas_kernels.weight_only_matmul.config import Config, candidates, check_faster

ROOT = Path(__file__).parent.parent
CONFIG = load_config(ROOT / "configs" / "llama-2-7b.json")
E, F = CONFIG.hidden_size, CONFIG.intermediate_size
SHAPES = {"QKV": (3 * E, E), "O": (E, E), "gate and up": (2 * F, E), "down": (E, F)}  # N, K
XLA = "XLA"
MOST = 4200  # rows


def page_table() -> dict[tuple[str, str], str]:
    """The cells of the table, by kind of weight and product."""
    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    table = page[page.index("| weights |") :].split("\n\n")[0]
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return {
        (kind, name): cell
        for kinds, *cells in rows
        for kind in kinds.split(", ")
        for name, cell in zip(names[1:], cells)
    }


def ranges(kind_of: Callable[[int], Hashable]) -> str:
    """At which M another kind begins, XLA's by its name."""
    kinds = [kind_of(m) for m in range(1, MOST)]
    firsts = [m for m in range(1, MOST) if m == 1 or kinds[m - 1] != kinds[m - 2]]
    return ", ".join(f"{XLA} {m}" if kinds[m - 1] == XLA else str(m) for m in firsts)


def plain(name: str, dtype: str, m: int) -> Hashable:
    """The kernel of one row, that of several, or XLA's."""
    n, k = SHAPES[name]
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (n, k)))
    residual = jax.ShapeDtypeStruct((m, n), dtype) if name in ("O", "down") else None
    registry, more = (GATED, ()) if name == "gate and up" else (PRODUCT, (residual, x.dtype))
    return (m == 1) if choose(registry, "hopper", x, w, *more) is registry["mosaic"] else XLA


def coded(name: str, fmt: WeightFormat, m: int) -> Hashable:
    """What changes bits in a configuration, as its docstring says, or XLA's."""
    n, k = SHAPES[name]
    try:
        check_faster("bfloat16", m, n, k, fmt)
    except NotImplementedError:
        return XLA
    config = candidates(m, n, k, fmt)[0]
    return type(config), *(
        (config.fold, config.split, config.width, config.by_warp) if isinstance(config, Config) else ()
    )


@pytest.mark.parametrize(("kind", "name"), page_table(), ids=str)
def test_ranges_begin_where_the_page_says(kind, name):
    of = partial(plain, name, "bfloat16") if kind == "bf16" else partial(coded, name, parse_weight_format(kind))
    assert page_table()[kind, name] == ranges(of)


def test_the_table_has_all_products_and_kinds():
    kinds = ("bf16", "w4a16-g128", "w4a16-g128-zp", "w4a16-g32", "w4a16-g64", "nf4", "w8a16", "fp8-weight")
    assert set(page_table()) == {(kind, name) for kind in kinds for name in SHAPES}


def test_the_head_and_float16_are_xlas():
    assert {ranges(partial(plain, name, "float16")) for name in SHAPES} == {"XLA 1"}
    for m in (1, 2, 64, 512):
        x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((m, E), (CONFIG.vocab_size, E)))
        assert choose(PRODUCT, "hopper", x, w, None, "float32") is PRODUCT["xla"]
