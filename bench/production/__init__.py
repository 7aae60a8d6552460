"""The cost of production settings: encryption, credentials, metrics and verbose logs."""
