"""What tests of drafts share."""

import pytest

from jllm.programs.programs import Programs


@pytest.fixture
def compiled_in_turn(monkeypatch):
    """Each step waits for the program that it needs, with rows for drafts too: none takes a smaller one meanwhile."""
    monkeypatch.setattr(Programs, "_is_there", lambda self, *step: True)
