"""Text to token ids and back; the tokenizer and the template of a checkpoint."""
