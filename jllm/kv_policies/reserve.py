"""Defines a KV policy that reserves the longest length at admission."""

from collections.abc import Sequence as List

from jllm.engine.kv_policy import OnDemand
from jllm.engine.sequence import Sequence


class Reserve(OnDemand):
    """Allocates pages for max_length at admission, anywhere in the pool."""

    def admit(self, seq: Sequence, running: List[Sequence]) -> bool:
        pages = self.pool.allocate(self._begins(seq, running) - len(seq.pages))
        seq.pages += pages or []
        return pages is not None

    def _keep(self, running: List[Sequence]) -> int:
        return 0

    def _begins(self, seq: Sequence, running: List[Sequence]) -> int:
        return self.pool.pages_for(seq.max_length - 1)

    def grow(self, seq: Sequence, pages: int, spare: int, room: int) -> list[tuple[int, int]]:
        raise AssertionError(f"request {seq.request_id} outgrew what was reserved for max_length = {seq.max_length}")
