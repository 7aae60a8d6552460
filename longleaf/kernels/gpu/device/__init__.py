"""Device code in Triton."""
