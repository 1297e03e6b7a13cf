"""Defines where an engine runs: on one device, or on a mesh of devices that share the model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.parallel.mesh import has_processes, make_mesh, ranks_of, spread
from jllm.parallel.ranks import STACKED

if TYPE_CHECKING:
    from jllm.model.model import Model

type Placement = jax.Device | Mesh


def find_placements(wanted: int | Sequence[Placement] | None, config: LlamaConfig) -> list[Placement]:
    """Returns the placements of engines that serve this model. `wanted` has the placements, or their number; None means
    as many as fit on this process's devices. Each is as large as the model's mesh. Raises ConfigError for too many, for
    a device named twice, for placements of another size, and for a model that several processes share."""
    if has_processes(config):
        raise ConfigError("several processes share this model: one process has to have all devices of its replicas")
    there, size = jax.local_devices(), ranks_of(config)
    most = len(there) // size
    if wanted is None:
        wanted = most
    if isinstance(wanted, int):
        check_count(wanted, size, len(there))
        groups = [there[i * size : (i + 1) * size] for i in range(wanted)]
        return [group[0] if config.mesh is None else make_mesh(group) for group in groups]
    for each in wanted:
        if isinstance(each, Mesh) != (config.mesh is not None) or len(devices_of(each)) != size:
            where = "one device, and takes a device" if config.mesh is None else f"a mesh, and takes one of {size}"
            raise ConfigError(f"the model is on {where} for each replica, not {each!r}")
    used = [device for each in wanted for device in devices_of(each)]
    if not used or len(set(used)) < len(used):
        raise ConfigError("replicas need at least one device, and each but once")
    return list(wanted)


def check_count(wanted: object, size: int, there: int | None) -> None:
    """Raises ConfigError unless `wanted` engines of `size` devices fit the devices that are `there`; None: any number
    fits."""
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        raise ConfigError(f"replicas need a number of engines, not {wanted!r} (threads=True takes devices)")
    if there is not None and not 1 <= wanted <= there // size:
        needed = f"{wanted} replicas need {wanted * size} devices, and there are {there}"
        raise ConfigError(f"{needed}: give 1 to {there // size}")
    if wanted < 1:
        raise ConfigError(f"replicas need at least one engine, not {wanted}")


def devices_of(where: Placement) -> list[jax.Device]:
    return list(where.devices.flat) if isinstance(where, Mesh) else [where]


def name_of(where: Placement) -> str:
    return ", ".join(map(str, devices_of(where)))


def on(where: Placement, spec: PartitionSpec) -> jax.Device | NamedSharding:
    """Returns the target for jax.device_put at this placement. `spec` is the layout on a mesh."""
    return NamedSharding(where, spec) if isinstance(where, Mesh) else where


def copy_to(where: Placement, model: "Model") -> "Model":
    """Returns the model at this placement. On a mesh each device gets its share from the device that has the same one,
    so none ever holds more. Arrays that are there already are not copied. Raises ConfigError for a mesh that does not
    fit the model."""
    config = spread(replace(model.config, mesh=None), where) if isinstance(where, Mesh) else model.config
    return replace(model, config=config, params=jax.device_put(model.params, on(where, STACKED)))
