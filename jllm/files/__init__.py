"""All that is read from and written to a disk: configs, weights, tokenizers, snapshots, fingerprints."""
