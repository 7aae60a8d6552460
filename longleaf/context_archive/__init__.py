"""Parcels: contexts as streams of bytes, for another service with the same model to take in."""
