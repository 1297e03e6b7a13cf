"""Describes an axis of a mesh whose devices share a model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshAxis:
    """Holds the name of a mesh axis, for collectives in shard_map, and its GPUs, for exchanges over their memory."""

    name: str
    gpus: tuple[int, ...] | None = None  # local hardware ids in order; None: this process lacks some
