"""Describes an axis of a mesh whose devices share a model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshAxis:
    """Holds the axis's name for collectives inside shard_map, and what else an exchange needs to know."""

    name: str
    gpus: tuple[int, ...] | None = None  # local hardware ids of its devices in order; None: not all are this process's
