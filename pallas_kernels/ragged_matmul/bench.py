"""Measures products of a mixture's experts on the device, and how far each is from XLA's.

    python -m pallas_kernels.ragged_matmul.bench [--json] [--tokens 1 32] [--formats bf16 w4a16-g128]
        [--products gpt-oss-20b-down] [--peers mosaic triton xla ragged_dot tokamax]

Each figure is of several layers in one jit, with routes of their own. Bytes are those of the experts that have rows,
their scales included, of rows and of results. The floor is what they take at the rate of a large copy in the same run.
Schedules of mosaic's are made before, as a step's route makes them.
`off` is the distance from what backend xla makes of the same arrays, as a share of its norm. Without --peers only
mosaic is measured.

ragged_dot is JAX's own product, and tokamax the one of that package (pip install tokamax). Both take plain weights, of
[X, K, N] as they like them. A gated product of theirs has SiLU in a pass of XLA's.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import Row, make_parser, record
from pallas_kernels.bench.measure import copy_bandwidth, device_us
from pallas_kernels.bench.numbers import positive
from pallas_kernels.formats.quantized_rows import quantize_rows
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.ragged_matmul import ragged_matmul
from pallas_kernels.ragged_matmul.cases import FORMATS, PRODUCTS, TOKENS, Product, routed
from pallas_kernels.ragged_matmul.config import block_rows
from pallas_kernels.row_groups import Schedule, pairs_of
from pallas_kernels.silu_mul_quant import silu_mul_quant
from pallas_kernels.weight_only_matmul.bench import random_weight

LAYERS = 8
PEERS = ("mosaic", "triton", "xla", "ragged_dot", "tokamax")
OTHERS = PEERS[3:]  # by which plain weights alone are multiplied
REFERENCE = "reference"  # of one layer, by XLA
THREADS = 12  # that compile
NEAR = 0.01  # of XLA's result
FLOOR = 0.75  # of the floor, at least, in bf16; and 1 / 1.3 for one token of gpt-oss in mxfp4
BY_BYTES = 256  # tokens at most, of which products are bound by bytes: more have no bar for the floor
# Speed over bf16's, at least, for 32 tokens of Qwen3-30B-A3B.
FASTER = {"w4a16-g128": 2.2, "w8a8": 1.6}


def fits(product: Product, name: str) -> bool:
    return name == "bf16" or product.k % (parse_weight_format(name).group or 1) == 0


@partial(jax.jit, static_argnums=(0, 1))
def weights(product: Product, name: str) -> Any:
    """Returns the experts' weights, of random values."""
    shape = product.rows, product.k
    if name == "bf16":
        return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * jnp.bfloat16(product.k**-0.5)
    return random_weight(jax.random.key(0), name, *shape)


@partial(jax.jit, static_argnums=(0, 1, 2))
def inputs(rows: int, k: int, name: str) -> Any:
    """Returns random rows, in codes if the weights' format has such."""
    x = jax.random.normal(jax.random.key(1), (rows, k), jnp.bfloat16)
    kind = None if name == "bf16" else parse_weight_format(name).row_codes
    return x if kind is None else quantize_rows(x, kind)


def moved_bytes(product: Product, x: Any, w: Any, sizes: list[np.ndarray]) -> float:
    """Returns the bytes of a layer, in the mean of those with `sizes`."""
    whole, rows = (sum(leaf.nbytes for leaf in jax.tree.leaves(each)) for each in (w, x))
    touched = np.mean([np.count_nonzero(each) for each in sizes]) / product.experts
    return float(whole * touched + rows + 2 * sizes[0].sum() * product.n)


def by_others(product: Product, peer: str, x: Any, w: Any, sizes: list[jax.Array]) -> Callable[[], list[jax.Array]]:
    """Returns what runs another package's products."""
    if peer == "tokamax":
        from tokamax import ragged_dot  # no requirement: it brings a dozen packages
    else:
        from jax.lax import ragged_dot

    def layers(x: Any, w: Any, sizes: list[jax.Array]) -> list[jax.Array]:
        found = [ragged_dot(x, w, each, preferred_element_type=jnp.bfloat16) for each in sizes]
        return [silu_mul_quant(y, backend="xla") if product.gated else y for y in found]

    columns = jax.block_until_ready(jnp.swapaxes(w.reshape(product.experts, -1, product.k), 1, 2))
    made = jax.jit(layers).lower(x, columns, sizes).compile()
    return lambda: made(x, columns, sizes)


def compiled(product: Product, peer: str, x: Any, w: Any, sizes: list[jax.Array]) -> Callable[[], list[jax.Array]]:
    if peer in OTHERS:
        return by_others(product, peer, x, w, sizes)
    m, block, apart = len(jax.tree.leaves(x)[0]), 0, False
    if peer == "mosaic":
        block, apart = block_rows(m, w, product.experts, product.gated, product.chosen)

    def layers(x: Any, w: Any, sizes: list[jax.Array], schedules: list[Schedule | None]) -> list[jax.Array]:
        run = partial(ragged_matmul, gated=product.gated, out_dtype=jnp.bfloat16, backend=peer)
        return [run(x, w, each, schedule=schedule) for each, schedule in zip(sizes, schedules, strict=True)]

    pairs = [pairs_of(each, m, block, apart=apart) if block else None for each in sizes]
    schedules = [each and Schedule(each, block, apart) for each in pairs]
    made = jax.jit(layers).lower(x, w, sizes, schedules).compile()
    return lambda: made(x, w, sizes, schedules)


@jax.jit
def distance(found: jax.Array, wanted: jax.Array) -> jax.Array:
    y, z = (each.astype(jnp.float32) for each in (found, wanted))
    return jnp.linalg.norm(y - z) / jnp.linalg.norm(z)


def measured(labels: Row, product: Product, scheme: str, tokens: list[int], peers: list[str]) -> Iterator[Row]:
    """Yields one row a number of tokens and peer; one that fails says why."""
    w, xs = weights(product, scheme), {count: inputs(count * product.chosen, product.k, scheme) for count in tokens}
    routes = {count: [routed(product, count, layer) for layer in range(LAYERS)] for count in tokens}
    pending: dict[tuple[int, str], Future] = {}
    with ThreadPoolExecutor(THREADS) as pool:  # before any is timed: compiling may run things on the device
        for count in tokens:
            sizes = [jnp.asarray(each) for each in routes[count]]
            for peer in (peer for peer in peers if scheme == "bf16" or peer not in OTHERS):
                pending[count, peer] = pool.submit(compiled, product, peer, xs[count], w, sizes)
            pending[count, REFERENCE] = pool.submit(compiled, product, "xla", xs[count], w, sizes[:1])
    for count, peer in (key for key in pending if key[1] != REFERENCE):
        row = labels | {"peer": peer, "tokens": count, "experts": int(np.count_nonzero(routes[count][0]))}
        try:
            run = pending[count, peer].result()
            off = float(distance(run()[0], pending[count, REFERENCE].result()()[0]))
            us = device_us(run, repeats=3) / LAYERS
            moved = moved_bytes(product, xs[count], w, routes[count])
            row |= {"us": round(us, 2), "gb_s": round(moved / us / 1e3), "off": round(off, 5)}
        except Exception as error:  # costs its own row only
            row |= {"error": str(error).splitlines()[0][:200]}
        yield row


def table(products: list[str], formats: list[str], tokens: list[int], peers: list[str]) -> Iterator[Row]:
    """Yields all rows, after a copy's."""
    yield {"kernel": "copy", "gb_s": round(copy_bandwidth() / 1e9)}
    for name in products:
        product = PRODUCTS[name]
        for scheme in (scheme for scheme in formats if fits(product, scheme)):
            labels: Row = {"kernel": "ragged_matmul", "product": name, "scheme": scheme}
            yield from measured(labels, product, scheme, tokens, peers)


def bars(rows: list[Row]) -> Iterator[Row]:
    """Adds to each row its share of the floor, and yields the bars."""
    ceiling = max((row["gb_s"] for row in rows if row["kernel"] == "copy"), default=0)
    timed = [row for row in rows if "us" in row]
    cells = {(row["product"], row["scheme"], row["tokens"], row["peer"]): row for row in timed}
    for (product, scheme, tokens, peer), row in cells.items():
        row["fraction"] = round(row["gb_s"] / ceiling, 3)
        name = f"{product} {scheme} {tokens} tokens {peer}"
        yield bar(f"{name}: off XLA's", row["off"], "1", NEAR, most=True)
        if peer != "mosaic":
            continue
        least = FLOOR if scheme == "bf16" else 1 / 1.3 if (scheme, tokens) == ("mxfp4-weight", 1) else None
        if least is not None and tokens <= BY_BYTES and (scheme == "bf16" or product.startswith("gpt-oss")):
            yield bar(f"{name}: of the floor", row["fraction"], "1", round(least, 3))
        for other in OTHERS:
            if (theirs := cells.get((product, scheme, tokens, other))) is not None:
                yield bar(f"{name}: beside {other}", row["us"], "us", theirs["us"], most=True)
        plain = cells.get((product, "bf16", tokens, peer))
        if plain is not None and scheme in FASTER and tokens == 32 and product.startswith("qwen3"):
            yield bar(f"{name}: speed over bf16's", round(plain["us"] / row["us"], 3), "times", FASTER[scheme])


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS), help="products of experts")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), help="formats of weights")
    parser.add_argument("--tokens", nargs="+", type=positive, default=list(TOKENS), help="numbers of tokens")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS[:1]), help="backends")
    args = parser.parse_args(argv)
    for name in args.formats:
        if name != "bf16":
            parse_weight_format(name)
    return record("ragged_matmul", args, argv, table(args.products, args.formats, args.tokens, args.peers), bars)


if __name__ == "__main__":
    sys.exit(main())
