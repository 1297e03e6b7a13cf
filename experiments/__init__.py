"""Answers one question per command: `python -m experiments.NAME`. Each writes a dated file into results/; --help shows
how.

    time of a step              decode_step, throughput (PPL.LLM's table), quant_steps (by weight scheme),
                                step_profile (by kernel), ceilings (the rates behind floors)
    requests per second         qps, kv_measured (by KV policy), disaggregation; without a GPU simulate, and
                                simulation_error (of these)
    other devices               hardware: estimates from all data sheets, with prices
    cost of quantization        report (one page about your model), quant_accuracy, mixed_precision, ptq_methods,
                                continuations, long_context
    speculation                 speculation, train_drafters
    start-up                    start_up
    claims of others            claims C1 ... C32
    training                    train_small (the bundled model), train_needle, train_heads (KV heads),
                                train_length_predictor, grpo (by rewards), rollout_bits (trainer and engine)
    all commands for a GPU      measure_all, sanitizer
    the results                 results_page writes RESULTS.md

Commands share code in folders: steps/ (the step timer, floors, costs, devices, peers), serving/ (a workload and its
runs), accuracy/, baselines/ (what the engine is compared with), simulation/, training/, texts/, report/ (the pages).
workloads/ has requests and peers' figures. LOG.md has the lessons.
"""

from jllm.errors import how_to_install
from pallas_kernels.starting import need_gpu, need_package, refuse_gone

SMALLER = ("--config", "--layers")
# Options that need no GPU, by command. Commands that are not listed run anywhere.
NEED_GPU = {
    "experiments.adapter_steps": SMALLER,
    "experiments.ceilings": ("--keep",),
    "experiments.decode_step": SMALLER,
    "experiments.disaggregation": ("--simulate", *SMALLER),
    "experiments.engine_costs": SMALLER,
    "experiments.kv_measured": ("--config",),
    "experiments.measure_all": ("--list",),
    "experiments.qps": ("--config", "--model", "--url", "--host-only"),
    "experiments.quant_steps": SMALLER,
    "experiments.rollout_bits": ("--config", "--model"),
    "experiments.sanitizer": (),
    "experiments.speculation steps": SMALLER,
    "experiments.start_up": ("--config", "--model"),
    "experiments.step_profile": (),
    "experiments.throughput": SMALLER,
}
GONE = {  # removed commands -> their successors
    "experiments.first_command": "use experiments.start_up",
    "experiments.kv_choices": "LOG.md has its answers, and experiments.simulate compares policies",
    "experiments.load_memory": "tests/load_memory.py has it",
    "experiments.outliers": "use experiments.ptq_methods --models planted:64",
    "experiments.rotations": "use experiments.quant_accuracy --outliers, or experiments.ptq_methods --models",
    "experiments.step_tracing": "use experiments.start_up --processes",
    "experiments.train_card": "a model's card is written by hand, as jllm/assets/fairytale/README.md",
}
TRAINED = ("small", "needle", "heads", "drafters", "length_predictor")
TRAINING = ("experiments.grpo", *(f"experiments.train_{name}" for name in TRAINED))
refuse_gone(GONE)
need_gpu(NEED_GPU)
need_package("optax", TRAINING, how_to_install("train"))
