"""What the coordinator and the ranks say to each other: structs, encoded with msgpack."""
