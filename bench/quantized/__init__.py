"""Quantized checkpoints against 16-bit ones with the same number of parameters."""
