"""Kernels of CPUs: compiled code of ours, and those of torch."""
