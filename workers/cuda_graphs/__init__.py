"""The decode step of a device: inputs in memory of fixed address, and graphs of all that is launched over them."""
