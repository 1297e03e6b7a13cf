"""Holds what training the bundled model needs beside its loop."""
