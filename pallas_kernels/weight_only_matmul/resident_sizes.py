"""How the kernel with a resident x cuts a weight."""

from pallas_kernels.weight_only_matmul.plan_sm90 import Plan
from pallas_kernels.weight_only_matmul.stream_sm90 import CHUNK

TILE = 16  # rows of the weight
SWIZZLE = 128  # bytes
ROW_ORDER = [8 * half + i // 2 + 4 * (i % 2) for half in (0, 1) for i in range(8)]  # of a tile, by a product's rows


class Sizes:
    """What follows from a plan: chunks are of 128 columns."""

    def __init__(self, plan: Plan) -> None:
        config, fmt = plan.config, plan.format
        self.width = 2 if fmt.packed else 1  # columns of a byte
        self.warps = 4 * config.warpgroups
        self.chunks, self.tiles = plan.k // CHUNK, plan.n // TILE
        self.of_part = -(-self.chunks // config.split)  # chunks; copies begin at whole tiles of bytes
        self.of_part += self.of_part % self.width
        self.steps = -(-self.of_part // self.warps)
        self.row_bytes = self.warps * CHUNK // self.width  # of a stage
        self.groups = 0 if fmt.group is None else self.warps * CHUNK // fmt.group  # of a stage
        self.ragged = self.of_part % self.warps > 0 or self.chunks != self.of_part * config.split
        self.ctas = min(self.tiles, max(config.ctas // config.split, 1)) * config.split
