"""The commands, by noun."""
