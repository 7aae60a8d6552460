"""The coordinator: gRPC, scheduling, placement of keys, the fleet. It must not import torch."""
