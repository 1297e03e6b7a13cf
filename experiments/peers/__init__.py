"""Scripts that time other systems on the work of jllm's own benchmarks: README.md says what each needs."""
