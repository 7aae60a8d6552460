"""Weights divided over ranks against whole weights."""
