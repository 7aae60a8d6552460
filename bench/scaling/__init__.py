"""More ranks on more cores, and what this machine gives at most."""
