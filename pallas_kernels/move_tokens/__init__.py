"""Moves of tokens within their sequences' pages: compaction after a tree of drafts was verified."""

from pallas_kernels.move_tokens.api import move_tokens

__all__ = ["move_tokens"]
