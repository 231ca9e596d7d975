"""Gives the entries of a folder their names: whole or not at all, on every disk. It knows nothing of DeepSpeed."""
