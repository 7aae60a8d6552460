"""The workers: one process per rank that owns a share of the keys and values. It must not import grpc or ray."""
