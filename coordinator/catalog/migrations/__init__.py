"""From the tables of earlier versions to those of this one, step by step."""
