"""Measures what an engine's promises cost: the trainer's bits, other weights, an adapter that trains, and steering.

    python -m experiments.engine_costs --config configs/llama-2-7b.json
    python -m experiments.engine_costs --config configs/llama-3.2-1b.json --costs training

Weights are random. `added` is a time beside that without the promise, as a share of it.

- determinism: whole steps by the device's kernels, and with one order of sums. `scored` is the forward of
  jllm.token_logprobs beside the plain step of the same prompts.
- update: the engine's own time for other weights, without the wait for its step. Then that of waking, and that of
  16-bit weights which it quantizes.
- adapters: the time from an optimizer's step until the engine has the adapter.
- steering: engine steps in which each request has a vector, layer and scale of its own, beside those without hooks.
- bundled: engine steps of the bundled model with one request.
- training: one step of Adam in float32 beside a sleeping engine, and its peak of memory. It runs first, since a peak is
  that of the whole process.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jllm
from experiments.arguments import claim_memory
from experiments.result_file import bar, command_line, record, refusing
from experiments.steps.timer import StepTimer, compile_ahead, model_config, pool_for, random_params, step_of, stopwatch
from experiments.training.later import optax
from jllm.config import LlamaConfig
from jllm.model.model import Model
from jllm.model.params import Params
from jllm.step.buckets import Bucket
from pallas_kernels.backends import DETERMINISTIC
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.numbers import positive

Row = dict[str, Any]
PAGE = 16  # tokens
PROMPTS, PROMPT = 8, 1024
TRAINED = 8, 2048  # sequences of a micro-batch, and their tokens
NAME = "trained"
# Most of `added`, by the K and V of a decode step or by what prompts are computed for; then most of other quantities.
ADDED = {("decode", "model"): 0.06, ("decode", "int8-g8"): 0.15, ("long", "model"): 0.15, ("long", "int8-g8"): 0.15}
ADDED |= {("prefill", "model"): 0.25, ("scored", "model"): 0.25, ("steered", "model"): 0.03}
MOST = {"update_ms": 1.0, "wake_ms": 50.0, "quantize_ms": 60.0, "adapter_ms": 5.0, "bundled_ms": 0.6, "peak_gb": 70.0}


def engine_of(model: Model, slots: int, tokens: int, **options: Any) -> jllm.Engine:
    """Returns an engine of two sizes of steps, whose pool holds `tokens` of each slot."""
    sizes = (Bucket(slots, 0, 0), Bucket(slots, 8 * slots, slots))
    options = {"num_pages": slots * -(-tokens // PAGE), "page_size": PAGE, "executables": None} | options
    return jllm.Engine(model, max_slots=slots, max_step_tokens=9 * slots, buckets=sizes, **options)


def settled(work: Callable[[], Any]) -> float:
    """Returns the milliseconds until the device has done what `work` starts."""
    jax.block_until_ready(jnp.zeros(1) + 1)
    start = time.perf_counter()
    work()
    jax.block_until_ready(jnp.zeros(1) + 1)  # the device works in order
    return 1e3 * (time.perf_counter() - start)


def step_ms(engine: jllm.Engine, count: int, steps: int, repeats: int, **inputs: Any) -> float:
    """Returns the milliseconds of one of the engine's steps in which `count` requests decode: the best of the runs."""
    sampling = jllm.SamplingParams(max_new_tokens=steps * (repeats + 1) + 16, ignore_eos=True)
    for i in range(count):
        engine.submit([3 + i % 97] * 8, sampling, **{name: make(i) for name, make in inputs.items()})
    while engine.metrics()["output_tokens"] < 4 * count:
        engine.step()
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        best = min(best, time.perf_counter() - start)
    return 1e3 * best / steps


def determinism(params: Params, config: LlamaConfig, args: argparse.Namespace) -> Iterator[Row]:
    """Yields whole steps in one order of sums, and the forward that scores."""
    # Attention of a row begins afresh at 2,048 keys, so half of the slots also decode just past them.
    lengths = [("decode", args.batch, 1024), ("decode", max(1, args.batch // 2), 2048)]
    lengths += [("long", 1, each) for each in (8192, 32768)]
    cases: list[tuple[str, int, int, str | None]] = [
        (*case, kv) for case in lengths for kv in (None, "int8-g8") if case[2] + args.steps < config.context
    ]
    cases.append(("prefill", PROMPTS, PROMPT, None))
    timers, layouts = {}, {}
    for case, backend in ((case, backend) for case in cases for backend in (None, DETERMINISTIC)):
        kind, batch, tokens, kv = case
        pool = pool_for(batch, tokens + (1 if kind == "prefill" else args.steps), PAGE, kv)
        timers[case, backend] = StepTimer(params, config, pool, backend)
        layouts[case, backend] = step_of("prefill" if kind == "prefill" else "decode", batch, tokens)
    steps = compile_ahead({key: timer.recipe(layouts[key][0]) for key, timer in timers.items()}, args.threads)
    found: dict[Any, float] = {}
    for key, timer in timers.items():
        (kind, batch, tokens, kv), backend = key
        timer.renew()
        timer.place(0 if kind == "prefill" else tokens)
        count = 4 if kind == "prefill" else args.steps
        found[key] = 1e3 * timer.one(steps[key].result(), layouts[key][1], batch, count, args.repeats)
        timer.state = None
        if backend == DETERMINISTIC:
            yield row_of("determinism", kind, batch, tokens, kv, found[key], found[key[0], None])
    ids = jnp.tile(jnp.arange(PROMPT, dtype=jnp.int32) % 97, (PROMPTS, 1))
    given = {"tokens": ids, "lengths": jnp.full(PROMPTS, PROMPT, jnp.int32)}
    score = jax.jit(partial(jllm.token_logprobs, config=config, page_size=PAGE))
    jax.block_until_ready(score(params, **given))
    times = [settled(partial(score, params, **given)) for _ in range(args.repeats)]
    plain = found[("prefill", PROMPTS, PROMPT, None), None]
    yield row_of("determinism", "scored", PROMPTS, PROMPT, None, min(times), plain)


def row_of(cost: str, kind: str, batch: int, context: int, kv: str | None, ms: float, plain: float) -> Row:
    """Returns a row of a time beside that without what costs."""
    what = {"cost": cost, "kind": kind, "batch": batch, "context": context, "kv": kv or "model"}
    return what | {"ms": round(ms, 4), "plain_ms": round(plain, 4), "added": round(ms / plain - 1, 4)}


def updates(params: Params, config: LlamaConfig, args: argparse.Namespace) -> Iterator[Row]:
    """Yields the time of an update, of waking, and of an update that quantizes."""
    other = jax.block_until_ready(jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0.5, tree))(params))
    engine = engine_of(Model(config, params, None), args.batch, 1200)
    step_ms(engine, args.batch, 8, 1)
    times = []
    for each in (other, params) * args.repeats:
        before = engine.metrics()
        engine.update(each)
        engine.step()
        after = engine.metrics()
        times.append(1e3 * (after["update_seconds"] - before["update_seconds"]))
    yield {"cost": "update", "update_ms": round(min(times[1:]), 3), "update_bytes": engine.metrics()["update_bytes"]}
    engine.sleep()
    engine.wake()
    waking = []
    for _ in range(args.repeats):
        engine.sleep()
        waking.append(settled(engine.wake))
    yield {"cost": "update", "wake_ms": round(min(waking), 3)}
    engine.close()
    del engine, other
    engine = engine_of(Model(config, jllm.quantize(params, args.quantize), None), args.batch, 1200)
    step_ms(engine, args.batch, 8, 1)
    take = partial(engine.update, params, quantize=args.quantize)
    times = [settled(take) for _ in range(args.repeats + 1)]
    row = {"cost": "update", "scheme": args.quantize, "quantize_ms": round(min(times), 3)}
    yield row | {"first_ms": round(times[0], 1)}
    engine.close()


def adapters(params: Params, config: LlamaConfig, args: argparse.Namespace) -> Iterator[Row]:
    """Yields the time from an optimizer's step until the engine has the adapter."""
    adapter = jllm.init_adapter(config, jax.random.key(0), args.rank, alpha=2.0 * args.rank)
    engine = engine_of(Model(config, params, None), args.batch, 1200, adapters={NAME: adapter})
    sampling = jllm.SamplingParams(max_new_tokens=1000, ignore_eos=True, adapter=NAME)
    for i in range(args.batch):
        engine.submit([3 + i % 97] * 8, sampling)
    for _ in range(8):
        engine.step()
    trained = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0.5 if jnp.ndim(leaf) else leaf, tree))
    times, compiled = [], engine.metrics()["compile_programs"]
    for _ in range(args.repeats + 2):
        adapter = jax.block_until_ready(trained(adapter))
        times.append(settled(partial(engine.adapters.update, NAME, adapter, running="keep")))
        engine.step()
    compiled = engine.metrics()["compile_programs"] - compiled
    row = {"cost": "adapters", "rank": args.rank, "adapter_ms": round(min(times), 3)}
    yield row | {"first_ms": round(times[0], 2), "compiled": compiled}
    engine.close()


def steered(value: jax.Array, rows: Any) -> jax.Array:
    """Adds each request's own vector to the residual stream after its own layer."""
    own = rows.own(rows.inputs)
    there = (own["layer"] == rows.layer)[:, None]
    moved = value.astype(jnp.float32) + own["scale"][:, None] * own["vector"]
    return jnp.where(there, moved, value.astype(jnp.float32)).astype(value.dtype)


def steering(params: Params, config: LlamaConfig, args: argparse.Namespace) -> Iterator[Row]:
    """Yields engine steps in which each request is steered in its own way, beside plain ones."""
    E, slots = config.hidden_size, args.steered
    shapes = {"vector": (E,), "layer": (), "scale": ()}
    kinds = {"vector": jnp.float32, "layer": jnp.int32, "scale": jnp.float32}
    hooks = jllm.Hooks(
        edit={"layers.*.output": steered},
        inputs={name: jax.ShapeDtypeStruct(shape, kinds[name]) for name, shape in shapes.items()},
    )
    rng, times = np.random.default_rng(0), []

    def own(i: int) -> Row:
        vector = rng.standard_normal(E).astype(np.float32)
        return {"vector": vector, "layer": np.int32(i % config.num_layers), "scale": np.float32(0.01 * (i % 7))}

    context = args.steps * (args.repeats + 1) + 64
    for more, inputs in (({}, {}), ({"hooks": hooks}, {"inputs": own})):
        engine = engine_of(Model(config, params, None), slots, context, **more)
        times.append(step_ms(engine, slots, args.steps, args.repeats, **inputs))
        engine.close()
        del engine
    yield row_of("steering", "steered", slots, context // 2, None, times[1], times[0])


def bundled(params: Params, config: LlamaConfig, args: argparse.Namespace) -> Iterator[Row]:
    """Yields the time of an engine step of the bundled model."""
    model = jllm.load(dtype="bfloat16")
    engine = engine_of(model, 1, model.config.context)
    yield {"cost": "bundled", "bundled_ms": round(step_ms(engine, 1, args.steps, args.repeats), 4)}
    engine.close()


def training(params: Params, config: LlamaConfig, args: argparse.Namespace) -> Iterator[Row]:
    """Yields the seconds of rollouts, of an update and of a training step, and the peak of memory."""
    sequences, tokens = TRAINED
    masters = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree))(params)
    engine = engine_of(Model(config, params, None), args.batch, 512, deterministic=True)
    drawing = step_ms(engine, args.batch, args.steps, args.repeats)
    options = engine.token_logprobs_options()
    engine.sleep()
    optimizer = optax.adam(1e-6)
    state = optimizer.init(masters)
    ids = jnp.tile(jnp.arange(tokens, dtype=jnp.int32) % 97, (sequences, 1))
    lengths = jnp.full(sequences, tokens, jnp.int32)

    def loss(masters: Params) -> jax.Array:
        found = jllm.token_logprobs(masters, config, ids, lengths, **options)
        assert isinstance(found, jax.Array), "no entropy was asked for"
        return -jnp.mean(found)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train(masters: Params, state: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(masters)
        change, state = optimizer.update(gradient, state, masters)
        masters = optax.apply_updates(masters, change)
        return masters, state, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), masters), value

    seconds = []
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        masters, state, cast, value = jax.block_until_ready(train(masters, state))
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    engine.update(cast)
    engine.wake()
    between = time.perf_counter() - start
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    row = {"cost": "training", "tokens": sequences * tokens, "step_s": round(min(seconds), 4), "loss": float(value)}
    row["trained_tokens_s"] = round(sequences * tokens / min(seconds))
    row["drawn_tokens_s"] = round(1e3 * args.batch / drawing)
    yield row | {"between_ms": round(1e3 * between, 2), "peak_gb": round(peak / 1e9, 2)}
    engine.close()


COSTS: dict[str, Callable[[Params, LlamaConfig, argparse.Namespace], Iterator[Row]]] = {
    "training": training,
    "update": updates,
    "adapters": adapters,
    "steering": steering,
    "bundled": bundled,
    "determinism": determinism,
}
USUAL = tuple(name for name in COSTS if name != "training")


def rows(args: argparse.Namespace) -> Iterator[Row]:
    note, config = stopwatch(), model_config(args.config, args.layers)
    params = jax.block_until_ready(random_params(config, "bfloat16"))
    note("weights made")
    for name in (name for name in COSTS if name in args.costs):
        for row in COSTS[name](params, config, args):
            yield {"model": Path(args.config).stem, **row}
        note(f"measured {name}")


def bars(rows: list[Row]) -> Iterator[Row]:
    for row in rows:
        most = ADDED.get((row.get("kind", ""), row.get("kv", "")))
        if most is not None:
            name = f"{row['model']} {row['cost']}, {row['kind']} of {row['batch']} at {row['context']}, KV {row['kv']}"
            yield bar(f"{name}: added", row["added"], "1", most, most=True)
        for name in (name for name in MOST if name in row):
            of = f"{row['model']} {row['cost']}: {name}"
            yield bar(of, row[name], name.rpartition("_")[2], MOST[name], most=True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--config", default="configs/llama-2-7b.json", help="file with the model's shape")
    parser.add_argument("--layers", type=positive, help="use only this many layers, for a trial")
    parser.add_argument("--costs", nargs="+", choices=COSTS, default=USUAL, help="what to measure")
    parser.add_argument("--batch", type=positive, default=64, help="number of decoding slots")
    parser.add_argument("--steered", type=positive, default=256, help="number of requests with vectors of their own")
    parser.add_argument("--rank", type=positive, default=16, help="rank of the adapter that trains")
    parser.add_argument("--quantize", default="w8a8", help="scheme of the engine that quantizes what it takes")
    parser.add_argument("--steps", type=positive, default=30, help="steps timed together")
    parser.add_argument("--repeats", type=positive, default=3, help="number of runs; the fastest counts")
    parser.add_argument("--threads", type=positive, default=12, help="number of threads that compile")
    add_result_options(parser)
    return parser.parse_args(argv)


@refusing
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    claim_memory()
    return record(args, "engine_costs", command_line("engine_costs", argv), rows(args), bars=bars)


if __name__ == "__main__":
    sys.exit(main())
