"""Defines a KV policy that allocates a run of pages of the predicted length."""

from collections.abc import Sequence as List

from jllm.engine.sequence import Sequence
from jllm.errors import ConfigError
from jllm.kv_policies.length import Predictor, Quantile
from jllm.kv_policies.predicted import Predicted
from jllm.kv_policies.runs import RunPool

OVERFLOWS = ("scatter", "move")


class Extent(Predicted):
    """Allocates a contiguous run of pages of the predicted length at admission.

    A sequence that outgrows its run continues in the pages right behind, if the first of these is free. It takes as
    many as it is now expected to need. Otherwise `overflow` decides:

        "move"      it moves to a longer run; if there is none, it continues as with "scatter"
        "scatter"   it continues in another run, or in a single page: the page table allows both

    "scatter" is the default. Pages are never compacted. The default predictor is a Quantile. It learns, so each engine
    needs its own.
    """

    pool: RunPool

    def __init__(
        self, predictor: Predictor | None = None, *, quantile: float | None = None, overflow: str = OVERFLOWS[0]
    ):
        super().__init__(Quantile() if predictor is None else predictor, quantile=quantile)
        if overflow not in OVERFLOWS:
            raise ConfigError(f"overflow must be {' or '.join(OVERFLOWS)}, not {overflow!r}")
        self.overflow = overflow

    def make_pool(self, num_pages: int, page_size: int) -> RunPool:
        return RunPool(num_pages, page_size)

    def admit(self, seq: Sequence, running: List[Sequence]) -> bool:
        pages = self._begins(seq, running) - len(seq.pages)
        if running and pages + self._keep(running) > self.pool.num_available:
            return False
        run = self.pool.allocate_run(pages)
        seq.pages += run or []
        return run is not None

    def _keep(self, running: List[Sequence]) -> int:
        """Returns how many running sequences may need a page in the next step, after their decode in this one."""
        size = self.pool.page_size
        return sum(len(s.pages) * size - s.computed <= 1 for s in running)

    def _begins(self, seq: Sequence, running: List[Sequence]) -> int:
        return max(self.pool.pages_for(self._expect(seq, running)), super()._begins(seq, running))

    def grow(self, seq: Sequence, pages: int, spare: int, room: int) -> list[tuple[int, int]]:
        available = self.pool.num_available
        want = max(pages, self.pool.pages_for(self._expect(seq)) - len(seq.pages))
        want = min(want, max(pages, available - spare), available)
        behind = self.pool.extend(seq.pages[-1], want) if seq.pages else []
        if behind:
            seq.pages += behind
            missing = pages - len(behind)
            return super().grow(seq, missing, spare, room) if missing > 0 else []
        shared = seq.cached // self.pool.page_size  # these stay where they are
        total = len(seq.pages) + want - shared
        if self.overflow == "move" and total <= min(room, available - spare):
            run = self.pool.allocate_run(total)
            if run is not None:
                copies = list(zip(seq.pages[shared:], run))
                seq.pages = seq.pages[:shared] + run
                return copies
        seq.pages += self.pool.allocate_run(want) or self.pool.allocate(min(pages, available)) or []
        return []
