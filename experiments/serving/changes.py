"""Changes engines in processes while they serve a workload: all take other weights, or the process of one is killed."""

import argparse
import time
from collections.abc import Sequence

import jax
import numpy as np

from experiments.serving.run import run_once
from experiments.serving.workload import Request, Row
from jllm.distributed.processes import EngineProcess
from jllm.distributed.replicas import Replicas
from jllm.model.params import Params, tree_bytes


def update(engine: Replicas, requests: Sequence[Request], args: argparse.Namespace, params: Params) -> Row:
    """Returns the measures of a run in which all engines take other weights once half of the requests have ended.
    `params` has their shapes. The engines sleep meanwhile, since their pages leave no room for two models."""
    new = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.01, leaf.dtype), params)
    found: Row = {"repeat": "update", "change": "update", "weights_gib": round(tree_bytes(new) / (1 << 30), 3)}

    def change() -> None:
        start, busy = time.perf_counter(), time.thread_time()
        engine.sleep()
        asleep = time.perf_counter()
        found["version"] = engine.update(new)
        taken = time.perf_counter()  # the last engine has the weights
        found["host_ms"] = 1e3 * (time.thread_time() - busy)
        engine.wake()
        awake = time.perf_counter()  # all serve them from now on
        found.update(sleep_s=asleep - start, update_s=taken - asleep, wake_s=awake - taken, pause_s=awake - start)

    row, _ = run_once(engine, requests, args, midway=change)
    return row | found


def kill(engine: Replicas, requests: Sequence[Request], args: argparse.Namespace) -> Row:
    """Returns the measures of a run in which the first process is killed once half of the requests have ended. Raises
    RuntimeError unless each request has all its tokens."""
    first = engine._all[0]
    assert isinstance(first, EngineProcess)
    row, _ = run_once(engine, requests, args, midway=first.kill)
    return row | {"repeat": "kill", "change": "kill", "failed": engine.metrics()["replicas_failed"]}
