"""The life of one group of ranks: how they meet, what they do, and why they part."""
