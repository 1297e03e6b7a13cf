"""Times other systems on the work of jllm's own benchmarks. README.md lists what each script needs."""
