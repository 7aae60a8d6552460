"""Triton kernels and their host side. Imported only by a rank that uses them: Triton may be missing."""
