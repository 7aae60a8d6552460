"""What it costs, and what it brings, that a decode step verifies several tokens of a sequence."""
