"""Reads GGUF files, as llama.cpp writes them: config, weights and tokenizer in one file, or in a split one."""
