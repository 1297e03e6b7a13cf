"""Multiplies eight-bit operands with a scale for each row and column: what int8_matmul and fp8_matmul share."""
