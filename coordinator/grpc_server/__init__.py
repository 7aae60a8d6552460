"""The gRPC server. No other package of the coordinator depends on gRPC."""
