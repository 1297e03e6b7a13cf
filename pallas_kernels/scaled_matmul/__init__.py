"""What int8_matmul and fp8_matmul share: products of eight-bit operands, with a scale for each row and column."""
