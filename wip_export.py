"""python wip_export.py: kernels of GROUPS lowered here, to be compiled elsewhere."""
import os
import sys
import time

import jax
from jax import export

import wip_kv as w

os.makedirs("wip_blobs", exist_ok=True)
for heads, cell, texts in w.GROUPS:
    for text in texts:
        name = w.name_of(heads, cell, text)
        began = time.time()
        bench, case, run = w.made(heads, cell, text)
        leaves, tree = jax.tree.flatten(jax.eval_shape(run.make, bench.random_key()))
        f = jax.jit(lambda *leaves, tree=tree, run=run: run.attend(*jax.tree.unflatten(tree, leaves)))
        out = export.export(f, platforms=["cuda"], disabled_checks=[export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")])(*leaves)
        open(f"wip_blobs/{name}", "wb").write(out.serialize())
        print(name, os.path.getsize(f"wip_blobs/{name}"), round(time.time() - began, 1), flush=True)
