"""One command a question: `python -m experiments.NAME`, --help says how; each leaves a dated file in results/.

    how long a step takes       decode_step, throughput (PPL.LLM's table), quant_steps (by weight scheme),
                                step_profile (by kernel), ceilings (what floors count with)
    requests a second           qps, kv_measured (by KV policy), disaggregation; without a GPU simulate, kv_choices,
                                and simulation_error (of these)
    other devices               hardware: estimates from all data sheets, with prices
    what quantization costs     report (one page about your model), quant_accuracy, mixed_precision, ptq_methods,
                                rotations, outliers, continuations, long_context
    speculation                 speculation, train_drafters
    starts and memory           first_command, start_up, step_tracing (without a GPU), load_memory
    what others claimed         claims C1 ... C32
    training                    train_small, train_card (the bundled model), train_needle, train_heads (KV heads),
                                train_length_predictor
    all that wants a GPU        measure_all, sanitizer
    what came out               results_page writes RESULTS.md

What commands share is in rooms: steps/ (the step timer, floors, costs, devices, peers), serving/ (a workload and its
runs), accuracy/, baselines/ (what the engine is measured against), simulation/, training/, texts/, report/ (the pages).
workloads/ has requests and peers' figures, LOG.md what was learned.
"""

from jllm.errors import how_to_install
from pallas_kernels.starting import need_gpu, need_package

SMALLER = ("--config", "--layers")
# Options that do without a GPU, by command; others than these commands run anywhere.
NEED_GPU = {
    "experiments.ceilings": ("--keep",),
    "experiments.decode_step": SMALLER,
    "experiments.disaggregation": ("--simulate", *SMALLER),
    "experiments.kv_measured": ("--config",),
    "experiments.measure_all": ("--list",),
    "experiments.qps": ("--config", "--model", "--url", "--host-only"),
    "experiments.quant_steps": ("--draw", *SMALLER),
    "experiments.sanitizer": (),
    "experiments.speculation steps": SMALLER,
    "experiments.start_up": ("--config", "--model"),
    "experiments.step_profile": (),
    "experiments.throughput": SMALLER,
}
TRAINING = tuple(f"experiments.train_{name}" for name in ("small", "needle", "heads", "drafters", "length_predictor"))
need_gpu(NEED_GPU)
need_package("optax", TRAINING, how_to_install("learn"))
