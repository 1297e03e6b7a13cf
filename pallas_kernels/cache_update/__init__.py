"""Rotates Q and K by rotary embedding, and writes K and V into pages."""

from pallas_kernels.cache_update.api import cache_update, cache_update_fused

__all__ = ["cache_update", "cache_update_fused"]
