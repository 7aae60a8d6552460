"""The workers: one process per rank, which owns a share of the keys and values. Must not import grpc or ray."""
