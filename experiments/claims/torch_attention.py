"""Times FlashAttention-2 for decode with torch, in its own process: it and JAX cannot both use the profiler.

`flash_attention(cases)` starts `python -m experiments.claims.torch_attention`. That reads cases as JSON lines from
standard input, and answers each with a line: microseconds of a call, or an error. K and V are contiguous in bfloat16,
head after head, the best layout for torch's scaled_dot_product_attention. Its FlashAttention backend is forced.
"""

import json
import subprocess
import sys
from typing import Any

REPEATS = 5
TOLERANCE = 8e-3  # relative norm


def flash_attention(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns {"us", "wrong"} of one call, or {"error"}, for each case {R, length, H, K, D, sets}. `sets` of K and V
    rotate."""
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    command = [sys.executable, "-m", "experiments.claims.torch_attention"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    reason = (done.stderr.strip().splitlines() or ["it answered too little"])[-1][:200]
    return found + [{"error": reason}] * (len(cases) - len(found))


def measure(case: dict[str, int]) -> dict[str, Any]:
    """Returns the kernel time of one call, and the distance of its first row from float64."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
    from torch.profiler import ProfilerActivity, profile

    rows, length, heads, kv_heads, dim = (case[name] for name in ("R", "length", "H", "K", "D"))
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(rows, heads, 1, dim, **options)
    sets = [
        [torch.randn(rows, kv_heads, length, dim, **options) for _ in range(2)] for _ in range(case["sets"])
    ]  # K and V

    def attend(k: Any, v: Any) -> Any:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return scaled_dot_product_attention(q, k, v, enable_gqa=heads != kv_heads)

    out = [attend(*of_set) for of_set in sets][0]
    k, v = (x[0].double().repeat_interleave(heads // kv_heads, 0) for x in sets[0])
    weights = (q[0].double() @ k.transpose(1, 2) * dim**-0.5).softmax(-1)
    expected = weights @ v
    wrong = ((out[0].double() - expected).norm() / expected.norm()).item()
    if not wrong < TOLERANCE:
        return {"error": f"its result is wrong by {wrong:.1e} of its norm"}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            for of_set in sets:
                attend(*of_set)
        torch.cuda.synchronize()
    us = sum(event.self_device_time_total for event in profiler.key_averages()) / (REPEATS * len(sets))
    return {"us": us, "wrong": wrong} if us else {"error": "torch's profiler saw no kernel"}


def main() -> int:
    for line in sys.stdin:
        try:
            found = measure(json.loads(line))
        except Exception as error:  # loses only this case
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
