import jax
from jax import export

import wip_kv as w

for heads, cell, texts in w.GROUPS:
    for text in texts:
        bench, case, run = w.made(heads, cell, text)
        f = jax.jit(lambda run=run, bench=bench: jax.tree.leaves(run.make(bench.random_key())))
        out = export.export(f, platforms=["cuda"])()
        open("wip_blobs/" + w.name_of(heads, cell, text) + ".make", "wb").write(out.serialize())
        print(text, flush=True)
