# A first trial on two GPUs: $1 is where the result goes.
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
date; nvidia-smi topo -m | head -4; which nvcc
python3 -m pallas_kernels.all_reduce.bench --results $1 --limit 75 --backends peer --rows 1 16 64 128 512 4096
date
timeout 40 python3 -m pallas_kernels.all_reduce.mosaic_trial skip 1 64 512 2>&1 | tail -25
date
timeout 40 python3 -m pallas_kernels.all_reduce.mosaic_trial barrier 1 64 2>&1 | tail -25
date
python3 -m pallas_kernels.all_reduce.bench --results $1 --label other --limit 40 --backends two-shot --rows 1 64 128
date
python3 -m pallas_kernels.all_reduce.bench --results $1 --label xla --limit 40 --backends xla --rows 64 512 4096
date
