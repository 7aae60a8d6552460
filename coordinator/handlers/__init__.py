"""What one call of a client does: text in, text out. Knows neither the engine behind nor the wire before it."""
