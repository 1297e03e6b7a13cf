"""Trains what the engines serve: log-probabilities with gradients, equal to the engines' to the bit."""
