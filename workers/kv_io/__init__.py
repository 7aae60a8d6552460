"""Keys and values on their way to storage and back, beside the steps."""
