"""Decode steps on a device: inputs in memory of fixed address, and CUDA graphs of the launches over them."""
