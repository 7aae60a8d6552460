"""The loop that runs the steps, and the streams that its requests are read from."""
