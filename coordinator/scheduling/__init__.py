"""Who runs, when, and how much of it in one step."""
