"""One model over two processes by jax.distributed, each with a device of its own, as over hosts."""

import json
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import pytest

from jllm.engine.request import SamplingParams
from jllm.step.buckets import Bucket
from tests.tiny import one_size, serve, tiny_model

ROOT = Path(__file__).parent.parent
SIZES = one_size(2, tokens=14) | {"num_pages": 20, "buckets": (Bucket(2, 12, 2), Bucket(2, 0, 0))}
PROMPTS = [(5, 6, 7, 8), (3, 1, 4, 1, 5, 9), (40,), (7, 7)]
MORE = {"logprobs": 2, "presence_penalty": 0.5}
ASKS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8}, MORE, MORE | {"temperature": 0.8}]
PARAMS = [SamplingParams(seed=i, max_new_tokens=8, ignore_eos=True, **asks) for i, asks in enumerate(ASKS)]
PROCESS = """
    import json, os, sys
    import jax

    rank, address = int(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=rank, heartbeat_timeout_seconds=10)
    assert (len(jax.devices()), len(jax.local_devices())) == (2, 1)

    import time
    import jllm
    from jllm.programs.compiler import Compiler
    from tests.parallel.meshes import on_mesh
    from tests.test_processes import PARAMS, PROMPTS, SIZES
    from tests.tiny import tiny_model

    if rank == 1:  # has a slow compiler behind its steps
        behind = Compiler._behind
        Compiler._behind = lambda *of: time.sleep(2) or behind(*of)
    model = on_mesh(tiny_model("float64"), 2)
    engine = jllm.Engine(model, **SIZES)
    for what in (
        lambda: jllm.Engine(model, **SIZES, speculate="ngram"),
        lambda: engine.submit((5,), jllm.SamplingParams(temperature=0.5)),
        lambda: engine.submit((5,), jllm.SamplingParams(temperature=0.0), deadline=1.0),
        lambda: jllm.Engine(model, **SIZES | {"num_pages": None}),
    ):
        try:
            what()
            print("this was taken", file=sys.stderr)
            os._exit(3)
        except (jllm.RequestError, jllm.ConfigError) as error:
            assert "processes share this model, and each " in str(error), error
    engine.compile_ahead(PARAMS[:1], wait=False)

    def serve(coming, dies=None):
        ends, steps = {}, 0
        while engine.has_work or coming:
            if coming and steps % 3 == 0:
                engine.submit(*coming.pop(0))
            if rank == 1 and steps == dies:
                os._exit(9)
            ends |= {event.id: event.completion.token_ids for event in engine.step() if event.completion}
            steps += 1
        print(json.dumps(ends), flush=True)

    serve([*zip(PROMPTS, PARAMS)])
    try:
        serve([*zip(PROMPTS, PARAMS)], dies=3)
    except jllm.EngineClosed as error:
        print(json.dumps(str(error)), flush=True)
    os._exit(0)  # the other one has gone
"""


@pytest.fixture(scope="module")
def run():
    """The lines that both processes print, of which the second ends while they serve once more, and their exit
    statuses."""
    with socket.socket() as held:  # no other server gets the port before the first process listens there, seconds later
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        command = [sys.executable, "-c", textwrap.dedent(PROCESS)]
        started = [
            subprocess.Popen([*command, str(rank), address], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            said = [process.communicate(timeout=300)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    lines = [[line for line in text.splitlines() if line[:1] in '{"'] for text in said]
    return [[json.loads(line) for line in each] for each in lines], [each.returncode for each in started]


def test_both_processes_have_the_tokens_of_one_device(run):
    with jax.enable_x64(True):
        alone = serve(tiny_model("float64"), PROMPTS, PARAMS, **SIZES)
    wanted = {str(i): list(one.token_ids) for i, one in enumerate(alone)}
    (first, *_), second = run[0]
    assert [[first], second] == [[wanted], [wanted]]


def test_a_process_that_dies_ends_the_other_one_clearly(run):
    ((_, said), _), status = run
    assert status == [0, 9]
    assert "or a process that has one, has failed: start all processes anew" in said
