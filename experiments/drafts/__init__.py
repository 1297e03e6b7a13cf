"""The parts of experiments.speculation."""
