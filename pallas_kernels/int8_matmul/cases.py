"""Lists shapes of int8_matmul that tests and benchmarks share."""

from pallas_kernels.scaled_matmul.cases import make_bench_cases, make_cases

CASES = make_cases("int8")
BENCH_CASES = make_bench_cases("int8")
