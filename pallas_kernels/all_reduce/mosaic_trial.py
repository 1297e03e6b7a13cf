"""Trial of mosaic_sm90.py: python -m pallas_kernels.all_reduce.mosaic_trial skip|barrier ROWS..."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.all_reduce import mosaic_sm90 as mosaic
from pallas_kernels.all_reduce.bench import AXIS, LINKS, replay_weights, spread

CHAINS = (16,)


def main() -> None:
    skip, rows = sys.argv[1] == "skip", [int(x) for x in sys.argv[2:]]
    n, E, dtype = 2, 4096, jnp.bfloat16
    mesh = Mesh(np.asarray(jax.devices()[:n]), (AXIS,))
    weights = replay_weights(n, E, dtype)

    def steps(length, scaled):
        def own(x, *kept):
            refs = [jax.new_ref(k[0]) for k in kept]
            y = x[0]
            for _ in range(length):
                if scaled:
                    y = lax.optimization_barrier(y * weights[lax.axis_index(AXIS)])
                y = mosaic.all_reduce(y, refs, AXIS, n, skip)
                y = jnp.roll(y, 1, axis=1) if scaled else y
            return (y[None], *(jax.freeze(ref)[None] for ref in refs))

        spread_out = jax.shard_map(own, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
        return jax.jit(spread_out, donate_argnums=(0, 1, 2, 3))

    for M in rows:
        row = {"backend": f"mosaic-{sys.argv[1]}", "M": M}
        kept = [spread(jnp.stack([k] * n), mesh) for k in mosaic.memory(M * E, n, dtype)]
        parts = jnp.asarray(np.random.default_rng(M).normal(size=(n, M, E)), dtype)
        wanted = (parts[0].astype(jnp.float32) + parts[1].astype(jnp.float32)).astype(dtype)
        y, *kept = steps(1, False)(spread(parts, mesh), *kept)
        found = np.asarray(y)
        row["bits"] = all(x.tobytes() == np.asarray(wanted).tobytes() for x in found)
        print(json.dumps(row), flush=True)

        def alone(x):
            for _ in range(LINKS):
                a, b = lax.optimization_barrier([x * w for w in weights])
                x = lax.optimization_barrier((a.astype(jnp.float32) + b.astype(jnp.float32)).astype(dtype))
                x = jnp.roll(x, 1, axis=1)
            return x

        first = jnp.asarray(np.random.default_rng(8).normal(size=(M, E)), dtype)
        x, z = spread(jnp.stack([first] * n), mesh), first
        step, other, held = steps(LINKS, True), jax.jit(alone), []
        for i in range(20):
            x, *kept = step(x, *kept)
            z = other(z)
            if i % 50 == 0:
                held = [*held[-3:], spread(jnp.zeros((n, M + i, E), dtype), mesh), x + 0]
                x = held.pop()
        row["replayed_bits"] = all(p.tobytes() == np.asarray(z).tobytes() for p in np.asarray(x))
        print(json.dumps(row), flush=True)
        each = []
        for length in CHAINS:
            chain, times = steps(length, False), []
            x = spread(jnp.zeros((n, M, E), dtype), mesh)
            for _ in range(8):
                start = time.perf_counter()
                for _ in range(10):
                    x, *kept = chain(x, *kept)
                jax.block_until_ready(x)
                times.append((time.perf_counter() - start) / 10)
            each.append(1e6 * min(times[1:]) / length)
            print(json.dumps(row | {"chain": length, "us": round(each[-1], 2)}), flush=True)


main()
