"""Runs two policies on the QPS workload in turn, and measures how many more requests per second one serves.

Each round runs the first conversations at once under one policy, then under the other, sampled by top-k and top-p. They
use half of the slots of the table of requests per second, whose pages also fit 80 GB. Claims of one command share the
runs of the default policy. A claim's result is the gain within a round: the mean with its 95 % interval (Student's t).
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from experiments.baselines import DEVICES
from experiments.claims.claim import NOT_TESTED, Answer, Claim, Interval, Row, change_of, in_all, in_most
from experiments.claims.serving import KEPT, make_model, settings, workload
from experiments.result_file import rounded
from experiments.serving.engines import make_engine, sampling_of
from experiments.serving.run import run_once, warm_up
from jllm.engine.device import Device
from jllm.engine.engine import Engine

ROUNDS = 3
COUNT, SIZE = 512, {"slots": 256}
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
POLICIES: dict[str, dict[str, str]] = {
    "usual": {}, "static": {"batching": "static"}, "waiting": {"host": "wait"}, "padded": {"prefill": "padded"},
    "sorting": {"sampling": "sort"},
}  # fmt: skip
NOISE = 0.04  # share of requests per second that two runs of one policy have differed by


@dataclass
class Contest:
    """The workload under one policy after the other, round after round. So slow changes of a device affect all policies
    alike. A run that several claims need happens once.

    Each policy has its engine, compiled at its first run. Policies of one sampler share a device, with a fresh state
    for each run. The other sampler's device releases its memory meanwhile.
    """

    toy: bool
    _devices: dict[str, Device] = field(default_factory=dict)
    _engines: dict[str, Engine] = field(default_factory=dict)
    _rows: dict[tuple[str, int], Row] = field(default_factory=dict)

    def row(self, policy: str, at: int) -> Row:
        """Returns the run of a policy in a round."""
        if (policy, at) not in self._rows:
            self._rows[policy, at] = self._run(policy)
        return self._rows[policy, at]

    def _run(self, policy: str) -> Row:
        args = settings(self.toy, **SAMPLING, **({} if self.toy else SIZE), **POLICIES[policy])
        print(f"serving by the policy {policy}", file=sys.stderr, flush=True)
        if policy not in self._engines:
            self._engines[policy] = self._engine(args)
            self._engines[policy].compile_ahead([sampling_of(args)])
        self._free_but(args.sampling)
        self._devices[args.sampling].renew()
        engine, requests = self._engines[policy], workload(self.toy, COUNT)
        warm_up(engine, requests, args)
        row, _ = run_once(engine, requests, args)
        return rounded({name: row[name] for name in KEPT if name in row} | {"slots": args.slots})

    def _engine(self, args: argparse.Namespace) -> Engine:
        def device(*given: Any) -> Device:
            if args.sampling not in self._devices:
                self._free_but(args.sampling)
                self._devices[args.sampling] = DEVICES[args.sampling](*given)
            return self._devices[args.sampling]

        for other in self._devices.values():  # each has as many pages
            args.num_pages = other.sizes.limits.num_pages
        engine = make_engine(make_model(self.toy), args, device)
        assert isinstance(engine, Engine)
        return engine

    def free(self) -> None:
        """Releases the memory of all devices' pages. The next run has new ones."""
        self._free_but(None)

    def _free_but(self, sampling: str | None) -> None:
        for name, device in self._devices.items():
            if name != sampling:
                device.free()


@cache
def contest_of(toy: bool) -> Contest:
    return Contest(toy)


def contest(toy: bool, policies: Mapping[str, str]) -> Iterator[Row]:
    """Yields a row per run. Each round has one run of each policy, under the claim's own name for it."""
    for at in range(ROUNDS):
        for name, policy in policies.items():
            yield {"policy": name, "round": at} | contest_of(toy).row(policy, at)


def gain_of(rows: list[Row], ours: str, other: str) -> Interval | None:
    """Returns the relative gain of one policy in requests per second, over the rounds. Returns None if no round has
    both."""
    a, b = ([row for row in rows if row.get("policy") == name] for name in (ours, other))
    return change_of(a, b, "qps", NOISE)


def gain_holds(gain: Interval | None, least: float, most: float) -> Answer:
    """Returns whether there is a gain, and whether it is as large as stated: from `least` on, or "more" than `most`.
    Each is open if the interval allows both."""
    if gain is None:
        return NOT_TESTED, ""
    return in_most([gain.reaches(0.0)]), "more" if gain.reaches(most) else in_all([gain.reaches(least)])


def gain_words(who: str, gain: Interval | None, least: float, most: float) -> tuple[str, str]:
    """Returns the words for a gain of one policy, named `who`."""
    assert gain is not None
    _, size = gain_holds(gain, least, most)
    stated = {"no": f", not {100 * least:.0f} % more", "more": ", more than stated"}.get(size, "")
    noise = ", which is within noise" if gain.reaches(0.0) is None else stated
    side = "more" if gain.mean >= 0 else "fewer"
    line = f"{who} serves {abs(100 * gain.mean):.0f} % {side} requests a second{noise}."
    return f"{gain.shown('{:+.1f}', 100, ' %')} requests a second", line


def contest_claim(name: str, stated: str, growth: tuple[float, float], who: str, policies: Mapping[str, str]) -> Claim:
    """Returns a claim: the first of two policies, named `who`, serves more requests per second than the second one.
    `growth` is the stated gain, from and to."""
    ours, other = policies

    def holds(rows: list[Row]) -> Answer:
        return gain_holds(gain_of(rows, ours, other), *growth)

    def words(rows: list[Row]) -> tuple[str, str]:
        return gain_words(who, gain_of(rows, ours, other), *growth)

    measure = partial(contest, policies=policies)
    return Claim(name, stated, measure, holds, words, serves=True, alternates=True)
