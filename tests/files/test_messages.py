"""What messages say of one thing, and of the only choice."""

import jax
import pytest

import jllm
from jllm.errors import ConfigError, RequestError, between, counted
from jllm.parallel.mesh import make_mesh
from tests.tiny import tiny_model


def test_one_is_one():
    assert (counted(0, "turn"), counted(1, "turn"), counted(2, "turn")) == ("0 turns", "1 turn", "2 turns")
    assert (between(1, 1), between(1, 8), between(0, 7, "in {} .. {}")) == ("1", "1 to 8", "in 0 .. 7")


def test_the_only_device_is_the_only_choice(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [object()])
    for devices, asked in ((2, "2 devices"), (0, "0 devices")):
        with pytest.raises(ConfigError, match=f"^{asked} asked for, and there is 1: ask for 1$"):
            make_mesh(devices)


def test_sampling_of_several_is_for_as_many_prompts():
    with pytest.raises(RequestError, match="^2 SamplingParams for 1 prompt: give one for all, or one for each prompt$"):
        jllm.generate(tiny_model(), [[1]], [jllm.SamplingParams()] * 2)
