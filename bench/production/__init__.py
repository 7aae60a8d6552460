"""What the settings of production cost: encryption, credentials, metrics and a log that says more."""
