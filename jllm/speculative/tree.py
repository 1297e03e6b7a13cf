"""Defines the shape of a draft: a tree whose root is the sequence's newest token. A chain is a tree, too."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

MOST_NODES = 64  # nodes in a mask of ancestors, the root included


@dataclass(frozen=True)
class Tree:
    """Has Q nodes: the root, which is node 0, and a node for each draft. Parents come before their children, so the
    first few nodes of a tree are a tree as well."""

    parents: tuple[int, ...]  # of nodes 1 .. Q - 1

    def __post_init__(self):
        if len(self.parents) >= MOST_NODES:
            raise ValueError(f"a tree may have {MOST_NODES} nodes with its root, not {len(self.parents) + 1}")
        for node, parent in enumerate(self.parents, 1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} of a tree has parent {parent}, expected one from 0 to {node - 1}")

    @property
    def size(self) -> int:
        """Returns Q."""
        return len(self.parents) + 1

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(len(self.parents)))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Returns the distance of each node from the root."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return tuple(found)

    @property
    def depth(self) -> int:
        """Returns the most drafts on one path."""
        return max(self.depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Returns the index of each node among its parent's children, from 0. The root's is 0."""
        seen = [0] * self.size
        found = [0]
        for parent in self.parents:
            found.append(seen[parent])
            seen[parent] += 1
        return tuple(found)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Returns the nodes from the root to each node, both included."""
        found: list[tuple[int, ...]] = [(0,)]
        for node, parent in enumerate(self.parents, 1):
            found.append((*found[parent], node))
        return tuple(found)

    @property
    def first_path(self) -> tuple[int, ...]:
        """Returns the root, its first child, the first child of that, and so on."""
        found = [0]
        while found[-1] in self.parents:
            found.append(1 + self.parents.index(found[-1]))
        return tuple(found)

    def leaves(self, size: int) -> tuple[int, ...]:
        """Returns the leaves of the tree that has only the first `size` nodes."""
        return tuple(node for node in range(size) if node not in self.parents[: size - 1])

    def ancestors(self) -> np.ndarray:
        """Returns masks u32[Q, W]. Bit j % 32 of word j // 32 of row i is set iff node j is i or its ancestor."""
        masks = np.zeros((self.size, -(-self.size // 32)), np.uint32)
        for node, path in enumerate(self.paths):
            for j in path:
                masks[node, j // 32] |= np.uint32(1) << np.uint32(j % 32)
        return masks

    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Returns the nodes of each depth, from the root down."""
        return tuple(tuple(n for n, d in enumerate(self.depths) if d == depth) for depth in range(self.depth + 1))


def chain(drafts: int) -> Tree:
    """Returns a tree in which each draft follows the one before."""
    return Tree(tuple(range(drafts)))
