"""The kernels of GPUs against the bandwidth of the device: how much of it each reaches, and how fast prompts are read.

Needs a GPU, torch 2.11 and Triton 3.6 or newer; neither Ray nor a network nor anything else of Longleaf's dependencies.
Keys are filled at random, not prefilled. Times are those of CUDA events, medians after a warm-up. Usage:

    python -m bench.gpu --json > gpu.json
    python -m bench.gpu --table gpu.json         the same for people, on any machine
    python -m bench.gpu --list                   what is measured, on any machine
"""
