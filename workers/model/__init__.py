"""A model of transformers, its attention and its rotary positions handed over to the step."""
