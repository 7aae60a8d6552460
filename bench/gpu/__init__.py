"""What a GPU makes of it: kernels and whole decode steps against the bandwidth of the device, tokens that are chosen,
ranks that share it, and how fast prompts are read. What the paper of Tree Attention published stands beside.

Needs a GPU, torch 2.11 and Triton 3.6 or newer; neither Ray nor a network. Kernels need nothing else of Longleaf's
dependencies; what needs transformers is left out where that is not there, in a line that says so. Keys are filled at
random, not prefilled. Times are medians after a warm-up: of kernels those of CUDA events, of steps the host's. Usage:

    python -m bench.gpu --json > gpu.json
    python -m bench.gpu --table gpu.json         the same for people, on any machine
    python -m bench.gpu --table gpu.json --more steps.json
                                                 cases that gpu.json did not measure from another file
    python -m bench.gpu --list                   what is measured, on any machine
"""
