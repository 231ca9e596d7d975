"""Who owns an engine: one module for each framework that is served."""
