"""What happens around a save. Imports nothing of `load`."""
