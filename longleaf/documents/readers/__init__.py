"""Readers of file formats, one module each. They run in the confined process only, except in tests."""
