"""Hostile clients, an honest one beside them, and a service whose heart can be heard."""
