"""Scaling to more ranks on more cores, and the upper limit of this machine."""
