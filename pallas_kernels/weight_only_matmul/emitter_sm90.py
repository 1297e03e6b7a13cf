"""Emits what the kernels of weight_only_matmul on sm_90 do to single registers, as MLIR and PTX."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf, vector


class Emitter:
    """Emits 32-bit operations as MLIR and PTX; of a pair, two 16-bit floats at a time."""

    def __init__(self, dtype: jnp.dtype, pointers: dict[str, ir.Value]) -> None:
        self.names, self.pointers = tuple(pointers), pointers
        self.suffix = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"
        self.half = mgpu.utils.dtype_to_ir_type(dtype)
        self.i8, self.i16, self.i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 16, 32))
        self.f16, self.f32 = ir.F16Type.get(), ir.F32Type.get()

    def thread(self) -> ir.Value:
        return mgpu.utils.thread_idx()

    def c(self, value: int) -> ir.Value:
        return mgpu.c(value if value < 2**31 else value - 2**32, self.i32)

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return arith.addi(a, b)

    def times(self, a: ir.Value, b: int) -> ir.Value:
        return arith.muli(a, self.c(b))

    def bits_and(self, a: ir.Value, b: int) -> ir.Value:
        return arith.andi(a, self.c(b))

    def bits_xor(self, a: ir.Value, b: int) -> ir.Value:
        return arith.xori(a, self.c(b)) if b else a

    def xor(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return arith.xori(a, b)

    def masked_xor(self, a: ir.Value, mask: int, b: int | ir.Value) -> ir.Value:
        """Computes (a & mask) ^ b in one instruction."""
        b = self.c(b) if isinstance(b, int) else b
        return self._asm("lop3.b32 $0, $1, $2, $3, 0x6a;", a, self.c(mask), b)

    def equal(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return arith.cmpi(arith.CmpIPredicate.eq, a, b)

    def select(self, condition: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        return arith.select(condition, a, b)

    def low_half(self, word: ir.Value, half: int) -> ir.Value:
        """Returns 16 bits of a word."""
        return arith.trunci(self.i16, self.shift_right(word, 16 * half))

    def signed_byte(self, word: ir.Value, byte: int) -> ir.Value:
        """Returns a byte of a word, sign-extended."""
        return arith.extsi(self.i32, arith.trunci(self.i8, self.shift_right(word, 8 * byte)))

    def byte(self, word: ir.Value, byte: int) -> ir.Value:
        return self.bits_and(self.shift_right(word, 8 * byte), 255)

    def shift_right(self, a: ir.Value, b: int) -> ir.Value:
        return arith.shrui(a, self.c(b)) if b else a

    def load(self, name: str, offset: ir.Value, kind: int | str, more: int = 0) -> ir.Value:
        """Loads from `offset` + `more` bytes after an array's begin. It is 32 bits, 16 of them zero-extended, 8
        sign-extended, a float32, or a float16 or a power of two in E8M0 as float32."""
        pointer = mgpu.utils.getelementptr(self.pointers[name], [offset], self.i8)
        pointer = mgpu.utils.getelementptr(pointer, [more], self.i8) if more else pointer
        if kind == "f32":
            return llvm.load(self.f32, pointer)
        if kind == "f16":
            return arith.extf(self.f32, llvm.load(self.f16, pointer))
        if kind == "e8m0":
            return self.power(arith.extui(self.i32, llvm.load(self.i8, pointer)))
        if kind == 8:
            return arith.extsi(self.i32, llvm.load(self.i8, pointer))
        return arith.extui(self.i32, llvm.load(self.i16, pointer)) if kind == 16 else llvm.load(self.i32, pointer)

    def power(self, code: ir.Value) -> ir.Value:
        """Returns the float32 that a code of E8M0 stands for."""
        return arith.bitcast(self.f32, arith.maxui(self.times(code, 1 << 23), self.c(1 << 22)))  # 0 is 2^-127

    def float_of(self, a: ir.Value) -> ir.Value:
        return arith.sitofp(self.f32, a)

    def both(self, x: ir.Value) -> ir.Value:
        """Rounds a float32, twice."""
        return llvm.inline_asm(self.i32, [x], f"cvt.rn.{self.suffix}.f32 $0, $1, $1;", "=r,f")

    def from_fp8(self, word: ir.Value, half: int = 0) -> ir.Value:
        """Returns the two e4m3 values in a half of a word as a pair."""
        halves = llvm.inline_asm(self.i32, [self.low_half(word, half)], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
        if self.half == self.f16:
            return halves
        wide = arith.extf(ir.VectorType.get((2,), self.f32), llvm.bitcast(ir.VectorType.get((2,), self.f16), halves))
        return llvm.bitcast(self.i32, arith.truncf(ir.VectorType.get((2,), self.half), wide))

    def permute(self, a: ir.Value, b: ir.Value, selector: int) -> ir.Value:
        """Selects bytes of a (0 to 3) and b (4 to 7), by the selector's nibbles."""
        return self._asm("prmt.b32 $0, $1, $2, $3;", a, b, self.c(selector))

    def subtract(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._asm(f"sub.rn.{self.suffix} $0, $1, $2;", a, b)

    def multiply(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._asm(f"mul.rn.{self.suffix} $0, $1, $2;", a, b)

    def _asm(self, text: str, *arguments: ir.Value) -> ir.Value:
        return llvm.inline_asm(self.i32, list(arguments), text, "=r" + ",r" * len(arguments))


class StreamEmitter(Emitter):
    """Emits operations of global memory, and products of single warps, too."""

    def advance(self, name: str, index: ir.Value, size: int) -> None:
        """Moves an array's begin by `index` times `size` bytes: more than 32 bits count."""
        i64 = ir.IntegerType.get_signless(64)
        offset = arith.muli(arith.extui(i64, index), mgpu.c(size, i64))
        self.pointers[name] = mgpu.utils.getelementptr(self.pointers[name], [offset], self.i8)

    def minimum(self, a: ir.Value, b: int) -> ir.Value:
        return arith.minui(a, self.c(b))

    def below(self, a: ir.Value, b: int) -> ir.Value:
        return arith.cmpi(arith.CmpIPredicate.ult, a, self.c(b))

    def less(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return arith.cmpi(arith.CmpIPredicate.ult, a, b)

    def silu(self, gate: ir.Value, up: ir.Value) -> ir.Value:
        """Returns SiLU of a gate times up, by the special function unit, good to 2^-21."""
        power = arith.mulf(gate, self.number(-math.log2(math.e)))
        raised = llvm.inline_asm(self.f32, [power], "ex2.approx.f32 $0, $1;", "=f,f")
        sigmoid = arith.addf(raised, self.number(1.0))
        sigmoid = llvm.inline_asm(self.f32, [sigmoid], "rcp.approx.ftz.f32 $0, $1;", "=f,f")
        return arith.mulf(arith.mulf(gate, sigmoid), up)

    def stream(self, name: str, offset: ir.Value, more: int, pinned: bool = False) -> list[ir.Value]:
        """Loads four words that are read once; pinned: not after what comes later."""
        return self._global(name, offset, more, "ld.global.nc.L1::no_allocate.L2::128B", "u32", 4, pinned)

    def vector(self, name: str, offset: ir.Value, more: int) -> list[ir.Value]:
        """Loads four words of either memory."""
        pointer = mgpu.utils.getelementptr(self.pointers[name], [offset], self.i8)
        pointer = mgpu.utils.getelementptr(pointer, [more], self.i8) if more else pointer
        found = llvm.load(ir.VectorType.get((4,), self.i32), pointer, alignment=16)
        return [vector.extract(found, [], ir.DenseI64ArrayAttr.get([i])) for i in range(4)]

    def fetch(self, name: str, offset: ir.Value, more: int, words: int) -> list[ir.Value]:
        """Loads words that others read too."""
        return self._global(name, offset, more, "ld.global.nc", "u32", words)

    def load_vector(self, name: str, offset: ir.Value, more: int) -> ir.Value:
        """Loads a zero, or a float16 as it is stored."""
        if name.startswith("zeros"):
            return self._global(name, offset, more, "ld.global.nc", "s8", 1)[0]
        return self._global(name, offset, more, "ld.global.nc", "u16", 1)[0]

    def _global(
        self, name: str, offset: ir.Value, more: int, load: str, kind: str, words: int, pinned: bool = False
    ) -> list[ir.Value]:
        place = mgpu.utils.getelementptr(self.pointers[name], [offset], self.i8)
        narrow = kind == "u16"
        target, result = ("=h", self.i16) if narrow else ("=r", self.i32)
        names = ", ".join(f"${i}" for i in range(words))
        vector, targets = (f".v{words}", f"{{{names}}}") if words > 1 else ("", names)
        text = f"{load}{vector}.{kind} {targets}, [${words}+{more}];"
        constraints = ",".join([target] * words + ["l"])
        if words == 1:
            return [llvm.inline_asm(result, [place], text, constraints)]
        kinds = llvm.StructType.get_literal([result] * words)
        found = llvm.inline_asm(kinds, [place], text, constraints, has_side_effects=pinned)
        return [llvm.extractvalue(result, found, [i]) for i in range(words)]

    def matrices(self, name: str, offset: ir.Value, more: int) -> list[ir.Value]:
        """Loads four 8 x 8 matrices of 16 bits from shared memory: lane 8 i + r points to row r of the i-th. Lane 4 r +
        c gets elements 2c and 2c + 1 of row r of each."""
        pointer = mgpu.utils.getelementptr(self.pointers[name], [offset], self.i8)
        pointer = mgpu.utils.getelementptr(pointer, [more], self.i8) if more else pointer
        shape = ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>")
        kind = nvvm.LdStMatrixEltType.B16
        found = nvvm.ldmatrix(pointer, layout=nvvm.MMALayout.row, num=4, shape=shape, elt_type=kind)
        return [llvm.extractvalue(self.i32, found, [i]) for i in range(4)]

    def widened(self, scale: ir.Value) -> ir.Value:
        """Returns what load_vector gives, as float32."""
        return arith.extf(self.f32, arith.bitcast(self.f16, scale))

    def zero(self) -> ir.Value:
        return self.number(0.0)

    def number(self, x: float) -> ir.Value:
        return mgpu.c(x, self.f32)

    def minus(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return arith.subf(a, b)

    def plus(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return arith.addf(a, b)

    def scaled(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return arith.mulf(a, b)

    def fused(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Computes a b + c, rounded once."""
        return llvm.inline_asm(self.f32, [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")

    def multiply_add(self, left: list[ir.Value], right: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
        """Multiplies a warp's [16, 16] by [16, 8], and adds float32 sums."""
        kind = self.suffix.removesuffix("x2")
        found = llvm.inline_asm(
            llvm.StructType.get_literal([self.f32] * 4),
            [*left, *right, *sums],
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        )
        return [llvm.extractvalue(self.f32, found, [i]) for i in range(4)]

    def either(self, condition: ir.Value, values: Callable[[], list[ir.Value]], others: list[ir.Value]) -> list[Any]:
        """Returns values() where the condition holds, which is the same for a whole warp."""
        branch = scf.IfOp(condition, [x.type for x in others], has_else=True)  # type: ignore[call-arg, arg-type]
        with ir.InsertionPoint(branch.then_block):
            scf.yield_(values())
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(others)
        return list(branch.results)

    def only(self, condition: ir.Value, do: Callable[[], None]) -> None:
        with mgpu.utils.when(condition):
            do()

    def store(self, name: str, offset: ir.Value, more: int, words: list[ir.Value]) -> None:
        """Stores four words."""
        pointer = mgpu.utils.getelementptr(self.pointers[name], [offset], self.i8)
        pointer = mgpu.utils.getelementptr(pointer, [more], self.i8) if more else pointer
        value = llvm.mlir_undef(ir.VectorType.get((4,), self.i32))
        for i, word in enumerate(words):
            value = llvm.insertelement(value, word, position=self.c(i))
        llvm.store(value, pointer, alignment=16)

    def store_float(self, name: str, offset: ir.Value, x: ir.Value, dtype: jnp.dtype) -> None:
        """Stores a float32, rounded to dtype."""
        target = mgpu.utils.dtype_to_ir_type(dtype)
        pointer = mgpu.utils.getelementptr(self.pointers[name], [offset], self.i8)
        llvm.store(x if target == self.f32 else arith.truncf(target, x), pointer)

    def synchronize(self) -> None:
        """Waits for all threads of the CTA."""
        gpu.barrier()

    def synchronize_warpgroup(self) -> None:
        mgpu.utils.warpgroup_barrier()
