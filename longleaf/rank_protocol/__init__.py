"""Messages between the coordinator and the ranks: structs, encoded with msgpack."""
