"""The cost and the gain of decode steps that verify several tokens of a sequence."""
