"""Lists all measurements for a GPU, one per line, with its time limit in seconds. The most important come first.

`measure_all` runs them. `{results}` in a line becomes the results' directory. Tables only have rows that fit 80 GB.
"""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Command:
    """One command line for Python, and its time limit in seconds."""

    name: str
    line: str
    seconds: int
    timed: bool = True  # runs alone on the device; others run side by side
    peer_seconds: int = 0  # extra seconds if peers are measured too; 0: it has no peers
    of_peers: str = ""  # options for peers, which need their scripts
    gpus: int = 1  # number of GPUs, all on one host

    def __post_init__(self) -> None:
        if self.gpus > 1 and not self.timed:
            raise ValueError(f"{self.name}: what is not timed shares a GPU: gpus must be 1, not {self.gpus}")

    def beside(self, peers: Path | None) -> "Command":
        """Returns the command with peers' scripts added, if it has peers."""
        if peers is None or not self.peer_seconds:
            return self
        line = " ".join(filter(None, (self.line, self.of_peers, f"--peers {shlex.quote(str(peers))}")))
        return replace(self, line=line, seconds=self.seconds + self.peer_seconds)


def experiment(
    name: str, line: str, seconds: int, *, peer_seconds: int = 0, of_peers: str = "", gpus: int = 1
) -> Command:
    return Command(name, f"-m experiments.{line} --results {{results}}", seconds, True, peer_seconds, of_peers, gpus)


def bench(name: str, options: str, seconds: int, *, of: str = "", peer_seconds: int = 0, gpus: int = 1) -> Command:
    """Returns the benchmark of a kernel, by its own name or another one."""
    line = f"-m pallas_kernels.{of or name}.bench {options} --results {{results}}".replace("  ", " ")
    return Command(name, line, seconds, True, peer_seconds, gpus=gpus)


# 80 GB hold every scheme's weights at once, with K and V in bf16 of 256 sequences of 160 tokens.
STAGES = "decode:bf16:1,16,64,128,256 prefill:bf16:64,256 decode:int8-g8:64:bf16,w8a8"
FEW_BITS = "w4a16-g128 nf4 w8a16 fp8-weight"
# Rows of throughput that fit 80 GB, without each table's largest batches. They are the best, median and longest of
# three runs.
FEW = "1x8x256 16x8x256 64x8x256 128x8x256 256x8x256 1x1024x1024 16x1024x1024"
FEWEST = "1x8x256 16x8x256 128x8x256"
TIMED = "--engine --seconds 0.3 --repeats 3 --threads 16"
# The model that train_small --size subject writes to ./subject, with schemes that all backends have. Mosaic refuses
# MLPs of 704 (as in the bundled model), fp4 and block floats, and a named backend has no fallback.
SERVED = (
    "continuations --dtype bf16 --model subject --schemes w8a16 w8a8 w8a8-all w8a8-groups fp8 fp8-weight llm-int8"
    " uint8-zp nf4 nf4-dq w4a16-g128 w4a16-g64-zp"
)
TESTS = (
    "-m pytest -o addopts= -p no:benchmark -v -n 12 --dist worksteal -m gpu --tb=short --durations 30"
    " --results={results} tests"
)

OF_EXPERTS = "decode_step --config configs/qwen3-30b-a3b.json --threads 16"

CAMPAIGN = (
    Command("tests", TESTS, 700, timed=False),
    Command("sanitizer", "-m experiments.sanitizer --results {results}", 240, timed=False),
    experiment("ceilings", "ceilings", 60),
    # One process shares two minutes of compiling, and the default policies' run of each round.
    experiment("serving", "claims C1 C3 C11 C4", 900),
    bench("decode_attention", "", 170, peer_seconds=60),
    bench("prefill_attention", "", 130, peer_seconds=40),
    experiment("C18", "claims C18", 180),
    experiment("C13", "claims C13", 200),
    experiment("C5", "claims C5", 100),
    experiment("quant_steps", "quant_steps --backend mosaic --steps 20 --repeats 3 --threads 14"
               f" --stages {STAGES}", 480),
    experiment("C24", "claims C24", 240),
    bench("sample", "", 90),
    experiment("C26", "claims C26", 240),
    experiment("C25", "claims C25", 320),
    experiment("step_profile_serve", "step_profile --kind serve --batch 1 384 --context 136 --steps 16", 100),
    experiment("C19", "claims C19", 90),
    experiment("C21", "claims C21", 120),
    experiment("C14", "claims C14", 180),
    experiment("C22", "claims C22", 90),
    bench("fp8_matmul", "--peer-rows 1 64 512 --seconds 80", 90, peer_seconds=60),
    bench("int8_matmul", "--peer-rows 1 16 64 512 --seconds 40", 60, peer_seconds=60),
    experiment("C28", "claims C28 --seconds 60", 420),
    # A steady state of five minutes at each load.
    experiment("C23", "claims C23 --seconds 300 --loads 1.0 1.1 1.2", 1150),
    bench("matmul", "", 120),
    bench("ragged_matmul", "--peers mosaic triton", 480),
    bench("swiglu", "--rows 1 16 64 128 256 --widths 11008 --tune", 60),
    bench("weight_only_matmul", f"--rows 1 16 64 512 --formats {FEW_BITS}", 70),
    bench("norm_quant", "--rows 1 8192 128 512", 60),
    bench("silu_mul_quant", "--rows 1 8192 128 512", 60),
    experiment("C16", "claims C16", 60),
    experiment("C31", "claims C31", 90),
    experiment("start_up", "start_up", 240),
    experiment("processes", "start_up --processes 0 8 15 --repeats 1 --label processes", 260),
    experiment("decode_step", "decode_step --batch 1 16 64 128 256 --backend xla default", 90),
    experiment("step_profile", "step_profile --batch 1 64 256", 60),
    experiment(
        "step_profile_w8a8", "step_profile --scheme w8a8 --kv-cache int8-g8 --batch 1 64 256 --context 136", 60
    ),
    experiment("step_profile_serve_w8a8", "step_profile --kind serve --scheme w8a8 --kv-cache int8-g8 --batch 1"
               " --context 136 --steps 16", 60),
    experiment("speculation", "speculation acceptance", 300),
    experiment("speculation_7b", "speculation steps --threads 14", 300),
    experiment("speculation_8b", "speculation steps --config configs/llama-3-8b.json", 300),
    bench("move_tokens", "", 120),
    experiment("kv_measured", "kv_measured --requests 384", 260),
    bench("weight_only_middle", f"--rows 128 256 --formats {FEW_BITS} --label middle", 60, of="weight_only_matmul"),
    experiment("deterministic", "decode_step --batch 1 16 64 128 256 --backend default deterministic"
               " --label deterministic", 90),
    experiment("rollout_bits", "rollout_bits --schemes bf16 w8a8 w4a16-g128 fp8", 300),
    experiment("adapter_steps", "adapter_steps --layers 8", 240),
    experiment("engine_costs", "engine_costs --costs adapters steering", 120),
    experiment("engine_costs_update", "engine_costs --costs update bundled --label update", 120),
    experiment("engine_costs_7b", "engine_costs --costs determinism --threads 16 --label 7b", 120),
    experiment("engine_costs_8b", "engine_costs --config configs/llama-3.1-8b.json --costs determinism --threads 16"
               " --label 8b", 180),
    experiment("engine_costs_1b", "engine_costs --config configs/llama-3.2-1b.json --costs training --label training",
               120),
    experiment("experts", f"{OF_EXPERTS} --batch 1 32 256 --label qwen3-30b", 150),
    experiment("experts_w4a16", f"{OF_EXPERTS} --batch 32 --scheme w4a16-g128 --label qwen3-30b-w4a16", 120),
    experiment("experts_w8a8", f"{OF_EXPERTS} --batch 32 --scheme w8a8 --label qwen3-30b-w8a8", 120),
    experiment("experts_mxfp4", "decode_step --config configs/gpt-oss-20b.json --batch 1 32"
               " --scheme experiments/workloads/experts-mxfp4.toml --label gpt-oss-20b", 120),
    bench("row_matmul", "", 150),
    experiment("continuations", f"{SERVED} --backend mosaic --label mosaic", 250),
    experiment("continuations_xla", f"{SERVED} --backend xla --label xla", 250),
)  # fmt: skip
FORMATS = (
    experiment("groups", "quant_steps --label groups --backend mosaic --schemes bf16 w8a8 w8a8-all w8a8-groups"
               " --stages decode:bf16:1,16,64,128 decode:int8-g8:1,16,64 prefill:bf16:64 --seconds 240", 280),
    experiment("groups_profile", "step_profile --scheme w8a8-groups --backend mosaic --batch 1 16 64 --context 136"
               " --label groups", 60),
    bench("weight_only_tune", "--rows 1 2 4 8 16 32 64 --formats w4a16-g128 nf4:2,16 w4a16-g32-zp:2,16"
          " --tune w4a16-g128 nf4 w4a16-g32-zp --peers mosaic --label warp", 240, of="weight_only_matmul"),
    bench("narrow", "--parts --cells 64x1024 128x2048 --label narrow", 75, of="decode_attention"),
    bench("zero_points", "--parts formats --heads 32/32 --formats int4-g32 int4-g128 int4-g128-zp int4-g32-h"
          " --label zp", 90, of="decode_attention"),
    *(
        experiment(name, f"decode_step --kv-cache {kv} --batch 1 64 --backend mosaic --repeats 5 --label {kv}", 60)
        for name, kv in (("unrotated", "int4-g32"), ("rotated", "int4-g32-h"))
    ),
)  # fmt: skip
TRITON = (
    Command("sanitizer_triton", "-m experiments.sanitizer --backend triton --label triton"
            " --results {results}", 200, timed=False),
    experiment("decode_step_triton", "decode_step --batch 1 16 64 128 --backend default triton --label triton", 90),
    experiment("decode_step_zp", "decode_step --kv-cache int8-g8-zp --batch 64 --backend triton xla --label triton-zp",
               60),
    experiment("qps_triton", "qps --backend default triton --repeats 1 --label triton", 320),
    experiment("throughput_triton", "throughput --scheme bf16 --kv-cache bf16 --backend triton --repeats 2"
               " --rows 1x8x256 32x8x256 128x8x256 512x8x256 16x1024x256 --label triton", 200),
    bench("decode_triton", "--parts formats --triton --label triton", 150, of="decode_attention"),
    bench("prefill_triton", "--mosaic-only --triton --triton-stages 3 5 --kv bf16 int8-g8 --label triton", 330,
          of="prefill_attention"),
    bench("int8_triton", "--triton --rows 1 16 64 512 4096 --seconds 100 --label triton", 140, of="int8_matmul"),
    bench("weight_only_triton", "--rows 1 16 --formats w4a16-g128 nf4 w8a16 --peers mosaic triton --label triton", 90,
          of="weight_only_matmul"),
    experiment("continuations_triton", f"{SERVED} --backend triton --label triton", 250),
)  # fmt: skip
AT_128 = "--batch 1 64 16 512 --context 128 --threads 16"
ON_TWO = f"--devices 2 1 {AT_128}"
OF_70B = "decode_step --config configs/llama-2-70b.json --context 128 --threads 16"
ON_TWO_70B = f"{OF_70B} --devices 2 --batch 1 16"
TWO_GPUS = (
    experiment("two", f"decode_step --label two {ON_TWO}", 200, gpus=2),
    # Both in 8 minutes: --only replicas_1b replicas --seconds 480. A plain 7B and one in a process are alike.
    experiment("replicas_1b", "qps --config configs/llama-3.2-1b.json --replicas 0 1 2 --repeats 2 --update --kill",
               200, gpus=2),
    experiment("replicas", "qps --replicas 1 2 --repeats 2 --update --kill", 340, gpus=2),
    experiment("two_70b_w8a8", f"{ON_TWO_70B} --label two-70b-w8a8 --scheme w8a8", 200, gpus=2),
    experiment("two_70b_w4a16", f"{ON_TWO_70B} --label two-70b-w4a16 --scheme w4a16-g128", 200, gpus=2),
    # Sixteen layers: with eight, a step takes the GPU no longer than the host. Three engines' pages fit beside them.
    experiment("disaggregation", "disaggregation --layers 16 --levels merged replicas apart --requests 100 --repeats 2"
               " --load 0.5 0.8 --label 16-layers", 240, gpus=2),
    experiment("two_8b", f"decode_step --label two-8b --config configs/llama-3-8b.json {ON_TWO}", 160, gpus=2),
    bench("all_reduce", "--limit 35 --rows 1 16 64 128 512 4096", 100, gpus=2),
)  # fmt: skip
FOUR_GPUS = (
    experiment("four", f"decode_step --label four --devices 4 2 1 {AT_128}", 280, gpus=4),
    experiment("four_replicas", "qps --replicas 1 2 4 --repeats 2", 540, gpus=4),
    experiment("four_70b", f"{OF_70B} --devices 4 --batch 1 16 64 --label four-70b", 240, gpus=4),
    experiment("four_meshes", "qps --devices 2 --replicas 2 --repeats 2", 300, gpus=4),
)
TWO_LARGE_GPUS = (experiment("two_70b", f"{ON_TWO_70B} --label two-70b", 240, gpus=2),)  # too large for 2 x 80 GB
OF_SERVERS = "--peer-seconds 50 --peer-names vllm"
ON_8B, ON_NEWER_8B = "--config configs/llama-3-8b.json", "--config configs/llama-3.1-8b.json"
ON_1B = "--config configs/llama-3.2-1b.json"
IN_8_BITS = "--quantize w8a8 --kv-cache int8-g8"
TABLES = tuple(
    experiment(name, f"throughput {options} {TIMED}", seconds, peer_seconds=peer_seconds, of_peers="--peer-seconds 60")
    for name, options, seconds, peer_seconds in (
        ("throughput", f"--scheme bf16 --kv-cache bf16 --rows {FEW} 384x8x256 32x1024x1024", 220, 320),
        ("throughput_w8a8", f"--scheme w8a8 --kv-cache int8-g8 --rows {FEW} 512x8x256 64x1024x1024", 240, 320),
        ("throughput_kv", f"--scheme bf16 --kv-cache int8-g8 --rows {FEWEST} 512x8x256 64x1024x1024", 190, 0),
        ("throughput_8b", f"{ON_8B} --scheme bf16 --kv-cache bf16 --rows {FEW}", 210, 0),
        ("throughput_1b", f"{ON_1B} --scheme bf16 --kv-cache bf16 --rows {FEW}", 190, 0),
        ("throughput_w4a16", f"--scheme w4a16-g128 --kv-cache bf16 --rows {FEWEST} 384x8x256 32x1024x1024", 190, 0),
    )
) + tuple(
    experiment(name, f"qps {options}", seconds, peer_seconds=320, of_peers=OF_SERVERS)
    for name, options, seconds in (
        ("qps", "--repeats 3", 240),
        ("qps_w8a8", f"{IN_8_BITS} --repeats 3", 240),
        ("qps_kv", "--kv-cache int8-g8 --repeats 2", 240),
        ("qps_8b", f"{ON_NEWER_8B} --repeats 3", 240),
        ("qps_8b_w8a8", f"{ON_NEWER_8B} {IN_8_BITS} --repeats 3", 240),
        ("qps_8b_steady", f"{ON_NEWER_8B} --rate 30 --cut 100 --repeats 1", 160),
    )
)
TOPICS = {
    "campaign": CAMPAIGN,
    "tables": TABLES,
    "formats": FORMATS,
    "triton": TRITON,
    "two-gpus": TWO_GPUS,
    "two-large-gpus": TWO_LARGE_GPUS,
    "four-gpus": FOUR_GPUS,
}
