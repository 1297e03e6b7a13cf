"""Moves tokens within their sequences' pages, to compact them after a tree of drafts was verified."""

from pallas_kernels.move_tokens.api import move_tokens

__all__ = ["move_tokens"]
