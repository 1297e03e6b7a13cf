"""Defines a loop whose host waits for each step."""

from jllm.engine.loop import Loop


class WaitingLoop(Loop):
    """Reads a step's tokens before it plans the next step."""

    def turn(self) -> None:
        """Runs one turn, like Loop.turn."""
        super().turn()
        before, self.in_flight = self.in_flight, None
        if before is not None:
            self.read(before)
