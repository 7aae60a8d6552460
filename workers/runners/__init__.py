"""The kinds of steps, one module each, and the verification of answers."""
