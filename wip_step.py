"""A decode step of w4a16 without the one-row kernel and with it, of a few layers."""
import sys, jax
from experiments import quant_steps
from pallas_kernels.weight_only_matmul import api, config
out, layers = sys.argv[1:]
real = api.takes_one_row
for which in ("after", "before"):
    for module in (api, config):
        module.takes_one_row = real if which == "after" else (lambda *a, **k: False)
    jax.clear_caches()
    print(which, flush=True)
    quant_steps.main(["--stages", "decode:bf16:1:w4a16-g128", "--layers", layers, "--repeats", "5", "--results", out, "--label", which])
