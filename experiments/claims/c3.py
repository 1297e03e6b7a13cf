"""Tests C3: host work beside the device's vs. a host that waits for each step.

One engine runs under two policies (contest.py). Either step t + 1 is planned and dispatched before the tokens of step t
are read, or each step is read before the next is planned.
"""

from experiments.claims.contest import contest_claim

STATED = "+5 to +10 % requests a second"
CLAIM = contest_claim("C3", STATED, (0.05, 0.10), "Pipelined host work", {"pipelined": "usual", "waiting": "waiting"})
