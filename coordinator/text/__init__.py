"""Text to token ids and back; tokenizer and chat template of a checkpoint."""
