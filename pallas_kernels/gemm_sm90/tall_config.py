"""How the Hopper product for many rows cuts its work. Light to import."""

from dataclasses import dataclass

SHARED_MEMORY = 227 * 1024  # bytes a CTA may have
H200_SMS = 132


@dataclass(frozen=True)
class Config:
    """A tile of the result is computed by two warpgroups of one CTA; CTAs are persistent.

    tile_m, tile_n: rows and columns of a tile; each warpgroup has half of its rows (or of its columns, where there are
    64 rows). stages: K steps of 128 bytes in flight. cluster_m, cluster_n: neighbouring tiles along M share W's rows
    by multicast, those along N share x's. split_k: CTAs of a cluster that share the K axis of a tile. group: tiles
    along M that are done before the next ones along N (L2 locality). ctas: the most CTAs that run.
    """

    tile_m: int = 128
    tile_n: int = 256
    stages: int = 4
    cluster_m: int = 1
    cluster_n: int = 1
    split_k: int = 1
    group: int = 8
    ctas: int = H200_SMS
