"""The loop that runs the steps, and the streams that its jobs are read from."""
