"""JAX as strict as it gets: what is implicit in library code fails here."""

import os

# Tests compile much and run little: the least optimization takes a third off a step's compile time on a CPU.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

# XLA's thread pool has a thread a core. Each thread of an interpreted kernel that waits at a barrier holds one of them:
# with two cores, three threads wait forever.
os.environ.setdefault("NPROC", "16")

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
