"""From the ranks of one epoch to those of the next: what is lost, how it comes back, who holds what."""
