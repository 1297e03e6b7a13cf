"""Makes the model and engine of an experiment's options. One engine only does the host's work."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from experiments.arguments import MEMORY_SHARE, check_backend
from experiments.baselines import BASELINES, engine_with
from experiments.policies import LEARNED, learned_by, policy_with
from experiments.steps.cost_model import shapes_of
from experiments.steps.floors import token_bytes
from experiments.steps.timer import random_params
from experiments.steps.words import words_tokenizer
from jllm.distributed.processes import share_gpus
from jllm.distributed.replicas import Replicas
from jllm.engine.device import Device
from jllm.engine.engine import Engine
from jllm.engine.kv_policy import Policy
from jllm.engine.request import SamplingParams
from jllm.engine.room import SHARE
from jllm.errors import ConfigError
from jllm.files.hf_config import load_config
from jllm.files.load import load, load_head
from jllm.model.model import Model
from jllm.model.params import tree_bytes
from jllm.parallel.mesh import make_mesh, spread
from jllm.programs.packed_step import WHOLE_STEP
from jllm.step.state import Outputs

MEMORY = ("kv_policy", "length_predictor", "admission_quantile")  # options of the engine's KV policy
DEVICE_BYTES = 139 << 30  # memory of an H200, used without a GPU


class HostOnly(Device):
    """A device that takes no time and has no memory. An Engine on it only does the host's work."""

    def fresh(self) -> None:
        return None

    def run(self, buffer, layout, variant) -> Outputs:
        self.programs.used.add((layout.bucket, variant, WHOLE_STEP))
        tokens: Any = np.ones(layout.bucket.decodes * layout.bucket.rows + layout.bucket.chunks, np.int32)
        return Outputs(tokens, None, None, None, None)

    def copy_pages(self, copies) -> None:
        pass

    def compile_ahead(self, variants, wait) -> int:
        return 0


def make_model(args: argparse.Namespace) -> Model:
    if args.replicas is not None:  # the engines' processes have the weights
        config = load_head(args.model).config if args.model else load_config(args.config)
        return shapes_of(config, args.quantize, config.dtype if args.model else args.dtype)
    if args.model:
        return load(args.model, quantize=args.quantize, mesh=args.devices)
    config = load_config(args.config)
    tokenizer = None if args.guided is None else words_tokenizer(config.vocab_size)
    if args.host_only:  # only needs shapes
        return replace(shapes_of(config, args.quantize, args.dtype), tokenizer=tokenizer)
    config = config if args.devices is None else spread(config, make_mesh(args.devices))
    return Model(config, random_params(config, args.dtype, args.quantize or "bf16"), tokenizer)


def rehearse(args: argparse.Namespace, longest: int) -> None:
    """Raises the engine's errors for the options, or for a request of `longest` tokens, before weights take minutes to
    build. It uses an engine without weights and device."""
    check_backend(args.backend)
    alone = argparse.Namespace(**{**vars(args), "host_only": True, "replicas": None})
    model = make_model(alone)
    for replicas in args.replicas or ():
        share_gpus(replicas or 1, args.devices)
    if longest > model.config.context:
        raise ConfigError(f"a request has {longest} tokens: the model's context is {model.config.context}")
    make_engine(model, alone).close()


def pages_of_h200(
    model: Model, page_size: int, kv_cache: str | None, least: int, memory: float = MEMORY_SHARE * DEVICE_BYTES
) -> int:
    """Returns the pages that an H200, or other memory (bytes), holds beside the weights, but at least `least`."""
    free = (1 - SHARE) * (memory - tree_bytes(model.params))
    return max(least, int(free / (page_size * token_bytes(model, kv_cache))))


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, ignore_eos=True
    )


def make_policy(model: Model, args: argparse.Namespace) -> str | Policy | None:
    """Returns the option kv_policy. It is a name if nothing else is set, so that each replica makes its own policy."""
    predictor = args.length_predictor
    if predictor is None and args.admission_quantile is None:
        return args.kv_policy
    if isinstance(predictor, str) and predictor.startswith(LEARNED):
        predictor = learned_by(predictor, model)
    return policy_with(args.kv_policy or "paged", predictor, args.admission_quantile)


def make_engine(
    model: Model, args: argparse.Namespace, device: Callable[..., Device] | None = None, backend: str | None = None
) -> Engine | Replicas:
    """Returns an engine by the options. `device` makes its device, instead of its sampler's. `backend` None is the best
    for the device."""
    names = ("page_size", "num_pages", "max_step_tokens", "kv_cache", "trace", "compile_processes", *BASELINES)
    options = {"max_slots": args.slots, "backend": backend} | {name: getattr(args, name) for name in names}
    options |= {"executables": getattr(args, "steps", None), "kv_policy": make_policy(model, args)}
    if args.pool_gib is not None:
        options["num_pages"] = int(args.pool_gib * (1 << 30) / (args.page_size * token_bytes(model, args.kv_cache)))
    if args.replicas is not None:
        alone = argparse.Namespace(**{**vars(args), "replicas": None})
        return Replicas(partial(make_model, alone), args.replicas, mesh=args.devices, make=engine_with, **options)
    if not args.host_only:
        return engine_with(model, device=device, **options)
    if options["num_pages"] is None:
        options["num_pages"] = pages_of_h200(model, args.page_size, args.kv_cache, args.slots)
    return engine_with(model, device=HostOnly, **options)
