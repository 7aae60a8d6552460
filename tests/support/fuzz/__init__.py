"""Requests of every kind, made from the descriptors of the protos, and a service that must bear them all."""
