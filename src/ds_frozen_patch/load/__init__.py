"""What happens around a load. Imports nothing of `save`."""
