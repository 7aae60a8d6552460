"""What it costs that contexts outlive everything, and what that saves."""
