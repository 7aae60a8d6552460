"""A pretended accelerator: the real steps of a rank on tensors without memory, with all that reaches the device noted.

What cannot be seen here is what a GPU computes, and how fast. What can be seen is what the host asks of it: launches,
copies, waits and allocations, each with the line that asked, so that tests can hold steps to a limit without a GPU.
"""
