"""Tests of models on several devices. The files spread_*.py run in processes with eight virtual CPU devices, which
tests/parallel/test_parallel.py starts, so that all other tests keep their one device."""
