"""The protocols by which GPUs exchange over peer memory (pallas_kernels/all_reduce/peer.cu), in all orders that there
are: ranks run at any speed, and what one writes to another arrives whenever it may.

A word stands for all that a rank sends another in a round. A rank does one thing after the other: it sends to its
peers, tells them so by a flag where that is needed, waits until what it needs is there, and reads it, all sources at
once, which is the strictest."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

ROUNDS = 3


class Place(NamedTuple):
    """Of `owner`'s buffer, where `source` writes."""

    owner: int
    source: int
    name: str


Words = frozenset[tuple[Place, int]]  # each of a round
State = tuple[tuple[int, ...], Words, Words]  # of each rank how far it is; the words that are there, and under way


@dataclass(frozen=True)
class Protocol:
    """places: in which rounds take turns. flags: a flag follows the words of a shot; fenced: not before these have
    arrived. Without flags the reader leaves nothing in a place, and sees by that when a word has arrived."""

    shots: int
    flags: bool
    places: int
    fenced: bool = True

    def data(self, shot: int, turn: int) -> str:
        return f"data {shot} {turn % self.places}"

    def program(self) -> list[tuple[str, int, int]]:
        """What each rank does: (act, shot, round)."""
        acts = ("data", "flag", "read") if self.flags else ("data", "read")
        return [(act, shot, turn) for turn in range(1, ROUNDS + 1) for shot in range(self.shots) for act in acts]


ONE_SHOT = Protocol(shots=1, flags=False, places=2)
TWO_SHOT = Protocol(shots=2, flags=True, places=1)


def explore(protocol: Protocol, ranks: int, slow: int | None = None) -> int:
    """Tries every order; returns how many states there are. slow: of how many ranks words may be under way for a while
    (None: all); those of the others arrive at once. Raises AssertionError for a state in which a word is lost, a rank
    reads what it must not, or all wait."""
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
        yield at, arrived(protocol, there, {word}), under_way - {word}
    for rank, counter in enumerate(at):
        if counter == len(program):
            continue
        act, shot, turn = program[counter]
        peers = [peer for peer in range(len(at)) if peer != rank]
        moved = (*at[:rank], counter + 1, *at[rank + 1 :])
        data = protocol.data(shot, turn)
        if act == "read":
            places = {Place(rank, peer, f"flag {shot}" if protocol.flags else data) for peer in peers}
            told = {turn} if protocol.flags else set(range(1, ROUNDS + 1))
            if places <= {place for place, number in there if number in told}:
                wanted = {(Place(rank, peer, data), turn) for peer in peers}
                assert wanted <= there, f"rank {rank} reads other words than those of {turn}: {state}"
                yield moved, there if protocol.flags else there - wanted, under_way
            continue
        sent = frozenset((Place(peer, rank, data if act == "data" else f"flag {shot}"), turn) for peer in peers)
        if act == "flag" and protocol.fenced and under_way & {(Place(peer, rank, data), turn) for peer in peers}:
            continue
        yield (moved, there, under_way | sent) if rank < late else (moved, arrived(protocol, there, sent), under_way)


def arrived(protocol: Protocol, there: Words, new: Iterable[tuple[Place, int]]) -> Words:
    """What is there once these words are, each in the place of what was there."""
    places = {place for place, _ in new}
    before = frozenset(word for word in there if word[0] in places)
    assert protocol.flags or not before, f"lost before they were read: {before}"
    return there - before | frozenset(new)


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
        replace(ONE_SHOT, places=1),
        replace(ONE_SHOT, flags=True, places=1),
        replace(ONE_SHOT, flags=True, fenced=False),
        replace(TWO_SHOT, fenced=False),
    ],
)
def test_faults_are_found(fault: Protocol):
    with pytest.raises(AssertionError, match="lost before|all wait|reads other words"):
        explore(fault, 2)
