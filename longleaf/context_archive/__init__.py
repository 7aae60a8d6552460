"""Context archives: byte streams that another service with the same model can import."""
