"""A fake accelerator: the real steps of a rank on tensors without memory, with a log of all device requests.

It cannot show the results or the speed of a GPU. It shows the host's requests: launches, copies, waits and allocations,
each with the line that made it, so that tests can limit the cost of a step without a GPU.
"""
