"""Whether the sources that are told of answers are where the answers stand, and what it costs to tell them."""
