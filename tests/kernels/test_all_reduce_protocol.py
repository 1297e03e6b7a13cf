"""Tries the protocols by which GPUs exchange over peer memory (pallas_kernels/all_reduce/peer.cu), in all orders.

Ranks run at any speed, and what one writes to another arrives whenever it may. A word stands for all that a thread
sends another rank in a round. A thread does one thing after the other. It sends to its peers, tells them so by a flag
where that is needed, and waits until what it needs is there. Then it reads it, all sources at once, which is the
strictest. All ranks do the same. So of states that differ by the names of ranks alone one is tried.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, permutations, product
from typing import Any, NamedTuple

import pytest

ROUNDS = 3


class Place(NamedTuple):
    """Names a place in `owner`'s buffer, where `source` writes."""

    owner: int
    source: int
    name: str


Act = tuple[str, int, int]  # what, shot, round
Words = frozenset[tuple[Place, int]]  # each of a round
State = tuple[tuple[tuple[int, ...], ...], Words, Words]  # of each rank how far its threads are; words there; under way


@dataclass(frozen=True)
class Protocol:
    """Describes a protocol.

    - places: in which rounds take turns.
    - flags: a flag follows the words of a shot; fenced: not before these have arrived. Without flags the reader leaves
      nothing in a place, and sees by that when a word has arrived.
    - threads: of a rank, of which the first alone has words in the second round, the last of an exchange. They meet at
      the end of that and, where `meets`, between its rounds.
    """

    shots: int
    flags: bool
    places: int
    fenced: bool = True
    threads: int = 1
    meets: bool = True

    def data(self, thread: int, shot: int, turn: int) -> str:
        return f"data {thread} {shot} {turn % self.places}"

    def program(self, thread: int) -> list[Act]:
        found: list[Act] = []
        for turn in range(1, ROUNDS + 1):
            acts = ("data", "flag", "read") if self.flags else ("data", "read")
            if thread == 0 or turn != 2:
                found += [(act, shot, turn) for shot in range(self.shots) for act in acts]
            if self.threads > 1 and (turn == 2 or turn == 1 and self.meets):
                found.append(("meet", 0, turn))
        return found


ONE_SHOT = Protocol(shots=1, flags=False, places=2)
TWO_SHOT = Protocol(shots=2, flags=True, places=1)
TWO_THREADS = replace(ONE_SHOT, threads=2)


def explore(protocol: Protocol, ranks: int) -> int:
    """Tries every order; returns how many states there are but for the names of ranks. Raises AssertionError for one in
    which a word is lost, a rank reads what it must not, or all wait."""
    programs = [protocol.program(thread) for thread in range(protocol.threads)]
    first: State = (((0,) * protocol.threads,) * ranks, frozenset(), frozenset())
    seen, todo = {nameless(first)}, [first]
    while todo:
        state = todo.pop()
        after = list(steps(protocol, programs, state))
        ended = all(at == tuple(map(len, programs)) for at in state[0])
        assert after or ended, f"all wait: {state}"
        for one in after:
            if (name := nameless(one)) not in seen:
                seen.add(name)
                todo.append(one)
    return len(seen)


def nameless(state: State) -> Any:
    """Returns the same for two states that differ by the names of ranks alone. It is the least that renaming makes of
    them, of the names that are in the order of what is known of each rank."""
    at, *both = state
    known = [
        (at[rank], sorted((i, p.owner == rank, p.name, turn) for i in (0, 1) for p, turn in both[i] if rank in p[:2]))
        for rank in range(len(at))
    ]
    alike = [list(same) for _, same in groupby(sorted(range(len(at)), key=known.__getitem__), key=known.__getitem__)]

    def renamed(order: list[int]) -> Any:
        new = {rank: name for name, rank in enumerate(order)}
        words = (sorted((new[p.owner], new[p.source], p.name, turn) for p, turn in some) for some in both)
        return tuple(at[rank] for rank in order), *map(tuple, words)

    return min(renamed(list(chain(*orders))) for orders in product(*map(permutations, alike)))


def steps(protocol: Protocol, programs: list[list[Act]], state: State) -> Iterator[State]:
    """Yields every state that one act leads to: a word's arrival, or a thread's next."""
    at, there, under_way = state
    for word in under_way:
        yield at, arrived(protocol, there, {word}), under_way - {word}
    for rank, thread in product(range(len(at)), range(protocol.threads)):
        if at[rank][thread] == len(programs[thread]):
            continue
        act, shot, turn = programs[thread][at[rank][thread]]
        moves = [i == thread or act == "meet" for i in range(protocol.threads)]
        counters = tuple(counter + move for counter, move in zip(at[rank], moves))
        moved = (*at[:rank], counters, *at[rank + 1 :])
        if act == "meet":  # all of them, once the last one comes
            nexts = [program[counter : counter + 1] for program, counter in zip(programs, at[rank])]
            if thread == 0 and all(some == [(act, shot, turn)] for some in nexts):
                yield moved, there, under_way
            continue
        peers = [peer for peer in range(len(at)) if peer != rank]
        data = protocol.data(thread, shot, turn)
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
        yield moved, there, under_way | sent


def arrived(protocol: Protocol, there: Words, new: Iterable[tuple[Place, int]]) -> Words:
    """Returns what is there once these words are, each in the place of what was there."""
    places = {place for place, _ in new}
    before = frozenset(word for word in there if word[0] in places)
    assert protocol.flags or not before, f"lost before they were read: {before}"
    return there - before | frozenset(new)


@pytest.mark.parametrize(
    ("protocol", "ranks", "states"),
    [
        (ONE_SHOT, 2, 33),
        (ONE_SHOT, 3, 306),
        (ONE_SHOT, 4, 7834),
        (TWO_SHOT, 2, 143),
        (TWO_SHOT, 3, 2161),
        pytest.param(TWO_SHOT, 4, 90311, marks=pytest.mark.exhaustive),
        (TWO_THREADS, 2, 275),
        (TWO_THREADS, 3, 15954),
    ],
)
def test_all_orders_end_well(protocol: Protocol, ranks: int, states: int):
    assert explore(protocol, ranks) == states


@pytest.mark.parametrize(
    "fault",
    [
        replace(ONE_SHOT, places=1),
        replace(ONE_SHOT, flags=True, places=1),
        replace(ONE_SHOT, flags=True, fenced=False),
        replace(TWO_SHOT, fenced=False),
        replace(TWO_THREADS, meets=False),
    ],
)
def test_faults_are_found(fault: Protocol):
    with pytest.raises(AssertionError, match="lost before|all wait|reads other words"):
        explore(fault, 2)


def test_renaming_ranks_loses_no_state(monkeypatch):
    """Tries all states, each by itself: they are as many as were known before ranks had no names."""
    monkeypatch.setitem(globals(), "nameless", lambda state: state)
    assert [explore(ONE_SHOT, 3), explore(TWO_SHOT, 3)] == [1516, 11455]
