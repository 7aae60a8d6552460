"""The processes of the ranks, on Ray or on this machine, and the control channel to them."""
