"""What quantization costs in accuracy, and what it is set against."""
