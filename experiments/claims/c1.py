"""Tests C1: dynamic batching vs. static batches, which wait for their longest member.

One engine runs under two policies (contest.py). Either requests join and leave at every step, or they come in batches
of as many as there are slots. A static batch prefills, then decodes as many rows as it has members until the last one
ends.
"""

from experiments.claims.contest import contest_claim

STATED = "+100 % requests a second, elsewhere +100 to +200 %"
CLAIM = contest_claim("C1", STATED, (1.0, 2.0), "Dynamic batching", {"dynamic": "usual", "static": "static"})
