"""Lists shapes of fp8_matmul that tests and benchmarks share."""

from pallas_kernels.scaled_matmul.cases import make_bench_cases, make_cases

CASES = make_cases("float8_e4m3fn")
BENCH_CASES = make_bench_cases("float8_e4m3fn")
