"""Recovery between epochs: remapping of ranks, restore from storage, recomputation, and rebalancing."""
