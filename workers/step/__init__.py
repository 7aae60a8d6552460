"""One step of one rank: from a plan to tensors, and through every layer."""
