"""CPU kernels: compiled C code, and those of torch."""
