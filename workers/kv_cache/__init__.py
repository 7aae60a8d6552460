"""One rank's keys and values: pools of slots, and the block table of runs by segment."""
