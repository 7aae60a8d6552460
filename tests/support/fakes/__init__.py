"""Test doubles of the product's interfaces."""
