"""The loop that runs the steps, and the event streams of its requests."""
