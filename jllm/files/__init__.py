"""Reads and writes all files of a model: configs, weights, tokenizers, snapshots, fingerprints."""
