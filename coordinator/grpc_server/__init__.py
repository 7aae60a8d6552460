"""The doors of the service: gRPC. The only package that knows it."""
