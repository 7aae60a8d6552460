"""Resources that the GPU kernels use on a multiprocessor, and their bounds: computed on a machine without a GPU.

Every variant is compiled ahead of time for every target, and the compiler's figures are kept in a golden table,
`tests/triton/resources.txt`; `bounds` derives the bounds from it. Nothing here has run on a device.

    python -m bench.occupancy                        the bounds, from the table
    python -m bench.occupancy --only "attend bf16 128 .*" --target sm_90 --fresh
    python -m bench.occupancy --write                compiles all of it, which takes long
"""
