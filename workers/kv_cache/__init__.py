"""One rank's keys and values: pools of slots, and which runs of which segment lie in them."""
