"""Transfer of contexts between services: export and import."""
