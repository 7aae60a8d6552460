"""Who may come in, whose tenant that is, and what a tenant may take."""
