"""One decode attention step over many ranks, and the rings that the tree is compared with."""
