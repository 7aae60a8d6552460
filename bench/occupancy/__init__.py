"""What the kernels of GPUs take of a multiprocessor, and what bounds them: computed on a machine without a GPU.

Every variant is compiled ahead of time for every target, and what the compiler says is kept in a golden table,
`tests/triton/resources.txt`; `bounds` says what follows from it. Nothing here has run on a device.

    python -m bench.occupancy                        the bounds, from the table
    python -m bench.occupancy --only "attend bf16 128 .*" --target sm_90 --fresh
    python -m bench.occupancy --write                compiles all of it, which takes long
"""
