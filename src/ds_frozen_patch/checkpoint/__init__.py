"""A DeepSpeed checkpoint directory seen from outside: its files and what is in them. Knows nothing of Lightning."""
