"""An engine whose host waits for each step."""

from jllm.engine.loop import Engine


class WaitingEngine(Engine):
    """Reads a step's tokens before it plans the next step."""

    def _turn(self) -> None:
        super()._turn()
        before, self._in_flight = self._in_flight, None
        if before is not None:
            self._read(before)
