"""Where an engine runs: on one device, or on a mesh of devices that share the model."""

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
    """For engines with this model: these placements, or as many as the devices of this process make in their order,
    each as large as the mesh that the model is on; None for as many as there are. Raises ConfigError for more, for a
    device that is named twice, for placements of another size, and for a model that several processes share."""
    if has_processes(config):
        raise ConfigError("several processes share this model: one process has to have all devices of its replicas")
    there, size = jax.local_devices(), ranks_of(config)
    most = len(there) // size
    if wanted is None:
        wanted = most
    if isinstance(wanted, int):
        if not 1 <= wanted <= most:
            needed = f"{wanted} replicas need {wanted * size} devices, and there are {len(there)}"
            raise ConfigError(f"{needed}: give 1 to {most}")
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


def devices_of(where: Placement) -> list[jax.Device]:
    return list(where.devices.flat) if isinstance(where, Mesh) else [where]


def name_of(where: Placement) -> str:
    return ", ".join(map(str, devices_of(where)))


def on(where: Placement, spec: PartitionSpec) -> jax.Device | NamedSharding:
    """Where jax.device_put is to put arrays that are there; spec: how, if it is a mesh."""
    return NamedSharding(where, spec) if isinstance(where, Mesh) else where


def copy_to(where: Placement, model: "Model") -> "Model":
    """Returns the model there. On a mesh each device gets its share from the device that has the same one, so that none
    ever holds more; what is there already is not copied. Raises ConfigError for a mesh that does not fit the model."""
    config = spread(replace(model.config, mesh=None), where) if isinstance(where, Mesh) else model.config
    return replace(model, config=config, params=jax.device_put(model.params, on(where, STACKED)))
