"""Checkpoints by name: finds, downloads and converts the model that `--model` names, before ranks start."""
