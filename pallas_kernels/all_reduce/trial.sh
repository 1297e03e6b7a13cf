# A second trial on two GPUs: $1 is where the result goes.
export PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
date
XLA_PYTHON_CLIENT_PREALLOCATE=false python3 -m pallas_kernels.all_reduce.bench --results $1 --limit 30 --backends peer --rows 1 64 512 4096 16 128
date
timeout 75 python3 -m experiments.decode_step --results $1 --label two --devices 2 1 --batch 1 64 16 512 --context 128 --threads 16
date
timeout 45 python3 -m experiments.decode_step --results $1 --label two-layers20 --config configs/llama-2-70b.json --layers 20 --devices 2 --batch 1 16 --context 128 --threads 16
date
XLA_PYTHON_CLIENT_PREALLOCATE=false timeout 25 python3 -m pallas_kernels.all_reduce.mosaic_trial skip 1 64 2>&1 | tail -25
date
