"""Small random models of every family that is served or refused, for tests and measurements."""
