"""Makes meshes, checks that they fit a model, and makes the config of each device's share.

A mesh has the one axis "model". The rank of a device is its place on that axis. Each rank has some query heads and
their KV heads, some columns of the MLP, and some rows of the vocabulary. With fewer KV heads than ranks, several ranks
keep the same KV head. Of a Mixture of Experts each rank has some experts whole, or some columns of each.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from jllm.config import LlamaConfig
from jllm.errors import ConfigError, between, counted
from jllm.parallel.memory import free_memory, is_host
from pallas_kernels.all_reduce import MeshAxis

AXIS = "model"
COPIED = ("kv_heads", "q_norm", "k_norm")  # axes of weights that ranks share out, or keep alike if there are too few
SHARED = ("heads", *COPIED, "ffn", "expert_ffn", "shared_ffn", "vocab")  # all that they share out


def make_mesh(devices: int | Sequence[jax.Device]) -> Mesh:
    """Returns a mesh of these devices, or of the first n devices if `devices` is a number. Raises ConfigError for more
    devices than there are, and for devices that are listed twice."""
    found = jax.devices()
    if isinstance(devices, int):
        if not 1 <= devices <= len(found):
            there = f"there {'is' if len(found) == 1 else 'are'} {len(found)}: ask for {between(1, len(found))}"
            raise ConfigError(f"{counted(devices, 'device')} asked for, and {there}")
        devices = found[:devices]
    if not devices or len(set(devices)) != len(devices):
        raise ConfigError("a mesh needs at least one device, each listed once")
    return Mesh(np.asarray(devices), (AXIS,))


def spread(config: LlamaConfig, mesh: Mesh) -> LlamaConfig:
    """Returns the config of the model on a mesh. Raises ConfigError if the mesh does not fit the model, with the
    numbers of devices that would fit."""
    if mesh.axis_names != (AXIS,):
        raise ConfigError(f"the mesh has the axes {', '.join(map(str, mesh.axis_names))}: expected one, {AXIS!r}")
    kinds = sorted({device.device_kind for device in mesh.devices.flat})
    if len(kinds) > 1:
        raise ConfigError(f"the mesh has different devices ({', '.join(kinds)}): expected one kind")
    if type(config) is not LlamaConfig:
        raise ConfigError(f"a {type(config).__name__} cannot be spread over devices; a LlamaConfig can")
    if config.activation_parts > 1:
        raise ConfigError(
            f"activation_parts={config.activation_parts} is for one device: on a mesh each device has one part"
        )
    if mesh.size not in fitting(config):
        fits = ", ".join(map(str, fitting(config)))
        devices = counted(mesh.size, "device")
        raise ConfigError(f"{devices} cannot share {_sizes(config)} evenly; these numbers of devices can: {fits}")
    return replace(config, mesh=mesh)


def fitting(config: LlamaConfig) -> list[int]:
    """Returns the numbers of ranks that share a model evenly. The vocabulary is padded, so any number fits it."""
    H, K = config.num_heads, config.num_kv_heads

    def fits(n: int) -> bool:
        even = not any(size % n for size in (H, *_widths(config, whole=_takes_whole(config, n))))
        return even and (K % n == 0 or n % K == 0)

    return [n for n in range(1, H + 1) if fits(n)]


def has_whole_experts(config: LlamaConfig) -> bool:
    """Returns whether each device of the config's mesh has some experts whole, not some columns of each."""
    return config.mesh is not None and _takes_whole(config, config.mesh.size)


def _takes_whole(config: LlamaConfig, ranks: int) -> bool:
    """Returns whether that number of ranks shares out whole experts. They are whole by default if they divide."""
    if config.experts is None:
        return False
    return config.experts.count % ranks == 0 if config.expert_parallel is None else config.expert_parallel


def _widths(config: LlamaConfig, whole: bool) -> list[int]:
    """Returns what ranks share of a model's MLPs: columns of the dense ones, experts or their columns."""
    found, experts = [] if config.all_experts else [config.intermediate_size], config.experts
    if experts is not None:
        found += [experts.count if whole else experts.ffn, *([experts.shared_ffn] if experts.shared_ffn else [])]
    return found


def _sizes(config: LlamaConfig) -> str:
    """Returns a phrase that names what ranks have to share."""
    found, experts = [f"{config.num_heads} heads", f"{config.num_kv_heads} KV heads"], config.experts
    found += [] if config.all_experts else [f"{config.intermediate_size} MLP columns"]
    if experts is not None:
        ways = {None: f"{experts.count} experts or {experts.ffn} columns of each", True: f"{experts.count} experts"}
        found.append(ways.get(config.expert_parallel, f"{experts.ffn} columns of each expert"))
        found += [f"{experts.shared_ffn} columns of the shared expert"] if experts.shared_ffn else []
    return f"{', '.join(found[:-1])} and {found[-1]}"


def rank_config(config: LlamaConfig) -> LlamaConfig:
    """Returns the config of one rank's share of a model on a mesh. Its vocabulary size is the whole model's."""
    if config.mesh is None:
        return config
    n, experts = config.mesh.size, config.experts
    if experts is not None:
        ffn = experts.ffn if has_whole_experts(config) else experts.ffn // n
        experts = replace(experts, ffn=ffn, shared_ffn=experts.shared_ffn // n)
    return replace(
        config,
        num_heads=config.num_heads // n,
        num_kv_heads=max(1, config.num_kv_heads // n),
        intermediate_size=max(1, config.intermediate_size // n),  # nothing has it if all layers have experts
        experts=experts,
        mesh=None,
        axis=mesh_axis(config.mesh),
        kv_copies=max(1, n // config.num_kv_heads),
    )


def mesh_axis(mesh: Mesh) -> MeshAxis:
    """Returns the axis of a mesh, with the ids of its GPUs if this process has all of them."""
    devices = list(mesh.devices.flat)
    own = all(d.platform == "gpu" and d.process_index == jax.process_index() for d in devices)
    return MeshAxis(AXIS, tuple(d.local_hardware_id for d in devices) if own else None)


def ranks_of(config: LlamaConfig) -> int:
    return 1 if config.mesh is None else config.mesh.size


def has_processes(config: LlamaConfig) -> bool:
    """Returns whether several processes share the model. Then no process may decide alone by what it alone measures."""
    return config.mesh is not None and config.mesh.is_multi_process


def free_of(mesh: Mesh | None, device: jax.Device | None = None) -> int | None:
    """Returns the bytes that are free on each device of a mesh, the least of all. Without a mesh they are those of
    `device`, by default the one that arrays go to. It is None if one of the devices reports nothing. CPU devices share
    this machine's memory."""
    if mesh is None:
        return free_memory(device)
    found = [free_memory(device) for device in mesh.local_devices]
    shared = mesh.size if is_host(mesh.local_devices[0]) else 1
    return None if None in found else min(free for free in found if free is not None) // shared


def stored_kv_heads(config: LlamaConfig) -> int:
    """Returns the number of KV heads that all ranks store together. It exceeds the model's if several ranks keep the
    same head."""
    return config.num_kv_heads if config.mesh is None else max(config.num_kv_heads, config.mesh.size)
