"""Pages of markdown about what was measured, from templates that look like them."""
