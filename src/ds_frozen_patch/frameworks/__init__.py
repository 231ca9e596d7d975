"""Who owns an engine: one module for each supported framework."""
