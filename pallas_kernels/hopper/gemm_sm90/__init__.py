"""Multiplies matrices on Hopper in Pallas Mosaic GPU, one kernel for many rows and one for few, behind one signature.

    tall.gemm, skinny.gemm(
        x,                  # [M, K] int8, float8_e4m3fn, bfloat16 or float16; any M >= 1
        w,                  # [N, K] of x's dtype; N and K multiples of 32
        *,
        x_scale=None,       # f32[M]
        w_scale=None,       # f32[N]
        bias=None,          # f32[N]
        residual=None,      # [M, N] of out_dtype
        out_dtype,          # bfloat16, float16 or float32
        config,             # how the kernel cuts its work: tall_config.Config, skinny_config.Config
        interpret=None,     # plgpu.InterpretGPUParams
    ) -> [M, N] of out_dtype

    out = cast(f32(x w^T) * x_scale[:, None] * w_scale[None, :] + bias[None, :] + residual)

int8 accumulates in s32, exactly, everything else in f32. The rest is in f32, in the order written, with one rounding at
the end. A row's bits depend neither on M nor on the other rows, within one configuration. Callers check arguments. The
modules of configurations import no Pallas; the kernels' modules do.
"""
