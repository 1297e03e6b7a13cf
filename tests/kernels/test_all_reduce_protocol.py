"""The protocol by which GPUs exchange over peer memory (pallas_kernels/all_reduce/peer.cu), in all orders that there
are: ranks run at any speed, and what one writes to another arrives whenever it may.

Of a lane's exchanges each word is its source, place and epoch; what they sum to is tested on GPUs. A rank does one
thing after the other: it writes to its peers, tells them so by a flag where words carry no epoch of their own, waits
until what it needs is there, and reads it. Waiting and reading all sources at once is the strictest: a word that is
written over before it was read is missed for ever."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

EPOCHS = 3


class Word(NamedTuple):
    """What `source` wrote at a place of `owner`'s buffer."""

    owner: int
    source: int
    place: str  # shot and, with two buffers, the epoch's parity


@dataclass(frozen=True)
class Protocol:
    """shots: of an epoch. flags: words carry no epoch, and a flag follows them; fenced: not before they have arrived.
    buffers: in which epochs take turns."""

    shots: int
    flags: bool
    buffers: int
    fenced: bool = True

    def place(self, kind: str, shot: int, epoch: int) -> str:
        return f"{kind}{shot}" + (str(epoch % self.buffers) if kind == "data" else "")

    def program(self) -> list[tuple[str, int, int]]:
        """What each rank does: (what, shot, epoch)."""
        acts = ("data", "flag", "read") if self.flags else ("data", "read")
        return [(act, shot, e) for e in range(1, EPOCHS + 1) for shot in range(self.shots) for act in acts]


ONE_SHOT = Protocol(shots=1, flags=False, buffers=2)
TWO_SHOT = Protocol(shots=2, flags=True, buffers=1)

# What is where: of each rank how far it is, the words that have arrived, and those under way.
State = tuple[tuple[int, ...], frozenset[tuple[Word, int]], frozenset[tuple[Word, int]]]


def explore(protocol: Protocol, ranks: int, slow: int | None = None) -> int:
    """Tries every order; returns how many states there are. slow: of how many ranks words may be under way for a while
    (None: all); those of the others arrive at once. Raises AssertionError for a state in which a rank reads what it must
    not, or in which all wait."""
    program, late = protocol.program(), ranks if slow is None else slow
    first: State = ((0,) * ranks, frozenset(), frozenset())
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        after = list(steps(protocol, program, late, state))
        assert after or min(state[0]) == len(program), f"all wait: {state}"
        new = [s for s in after if s not in seen]
        seen.update(new)
        todo.extend(new)
    return len(seen)


def steps(protocol: Protocol, program: list[tuple[str, int, int]], late: int, state: State) -> Iterator[State]:
    """Every state that one act leads to: a word's arrival, or a rank's next."""
    at, there, under_way = state
    for word in under_way:
        yield at, arrived(there, {word}), under_way - {word}
    for rank, counter in enumerate(at):
        if counter == len(program):
            continue
        act, shot, epoch = program[counter]
        peers = [peer for peer in range(len(at)) if peer != rank]
        moved = (*at[:rank], counter + 1, *at[rank + 1 :])
        data = protocol.place("data", shot, epoch)
        if act == "read":
            kind = protocol.place("flag" if protocol.flags else "data", shot, epoch)
            if {(Word(rank, peer, kind), epoch) for peer in peers} <= there:
                wanted = {(Word(rank, peer, data), epoch) for peer in peers}
                assert wanted <= there, f"rank {rank} reads other words than those of {epoch}: {state}"
                yield moved, there, under_way
            continue
        sent = frozenset((Word(peer, rank, protocol.place(act, shot, epoch)), epoch) for peer in peers)
        if act == "flag" and protocol.fenced and under_way & {(Word(peer, rank, data), epoch) for peer in peers}:
            continue
        yield (moved, there, under_way | sent) if rank < late else (moved, arrived(there, sent), under_way)


def arrived(there: frozenset[tuple[Word, int]], new: Iterable[tuple[Word, int]]) -> frozenset[tuple[Word, int]]:
    """What is there once these words are, each in the place of what was there."""
    places = {word for word, _ in new}
    return frozenset(x for x in there if x[0] not in places) | frozenset(new)


@pytest.mark.parametrize(
    ("protocol", "ranks", "slow", "states"),
    [
        (ONE_SHOT, 2, None, 56),
        (ONE_SHOT, 3, None, 1516),
        (ONE_SHOT, 4, 1, 1382),
        (TWO_SHOT, 2, None, 255),
        (TWO_SHOT, 3, None, 11455),
        (TWO_SHOT, 4, 1, 11715),
    ],
)
def test_all_orders_end_well(protocol: Protocol, ranks: int, slow: int | None, states: int):
    assert explore(protocol, ranks, slow) == states


@pytest.mark.parametrize(
    "fault",
    [
        replace(ONE_SHOT, buffers=1),
        replace(ONE_SHOT, flags=True, buffers=1),
        replace(ONE_SHOT, flags=True, fenced=False),
        replace(TWO_SHOT, fenced=False),
    ],
)
def test_faults_are_found(fault: Protocol):
    with pytest.raises(AssertionError, match="all wait|reads other words"):
        explore(fault, 2)
