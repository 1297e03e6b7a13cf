"""On the device: the one-row kernel against the streaming one."""
import time; T0 = time.time()
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.row_pieces_sm90 import silu_mul
from pallas_kernels.weight_only_matmul import mosaic_sm90, row_sm90
from pallas_kernels.weight_only_matmul.bench import random_weight
from pallas_kernels.weight_only_matmul.config import Config, RowConfig
bf, f32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
STREAM = Config(fold=4, warpgroups=1, stream=True)
def job(name, n, k, config, gated, normed, residual):
    w = jax.jit(lambda key: random_weight(key, name, n, k))(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, k), bf)
    g = jax.random.normal(jax.random.key(2), (k,), bf) if normed else None
    r = jax.random.normal(jax.random.key(3), (1, n), bf) if residual else None
    run = jax.jit(lambda x, w, g, r: row_sm90.product(x, w, g, None, r, f32, eps=1e-5, gated=gated, config=config)).lower(x, w, g, r).compile()
    rows = norm_quant(x, g, eps=1e-5)[0] if normed else x
    plain = jax.jit(lambda x, w: mosaic_sm90.weight_only_matmul(x, w, None, None, f32, config=STREAM)).lower(rows, w).compile()
    y, again = run(x, w, g, r), run(x, w, g, r)
    z = np.asarray(plain(rows, w)).astype(np.float64)
    if gated: a, u = np.split(z, 2, 1); z = a / (1 + np.exp(-a)) * u
    if residual: z = z + np.asarray(r).astype(np.float64)
    d = np.asarray(y).astype(np.float64)
    return float(np.linalg.norm(d - z) / np.linalg.norm(z)), bool((y == again).all())
W = "w4a16-g128"
JOBS = [(W, 4096, 11008, RowConfig(*c), False, False, True) for c in [(16, 1), (16, 2), (8, 1), (16, 2, 2)]]
JOBS += [(W, 22016, 4096, RowConfig(*c), True, True, False) for c in [(16, 1), (16, 2, 2)]]
JOBS += [(f, 12288, 4096, RowConfig(), False, True, False) for f in (W + "-zp", "w4a16-g32", "nf4", "w8a16", "fp8-weight")]
JOBS += [(W, 4096, 14336, RowConfig(), False, False, True), ("nf4", 22016, 4096, RowConfig(), True, True, False)]
with ThreadPoolExecutor(8) as pool:
    for each, found in zip(JOBS, [pool.submit(job, *j) for j in JOBS]):
        try: print(each, found.result(), round(time.time() - T0, 1), flush=True)
        except Exception as e: print(each, "ERROR", str(e)[:300], flush=True)
