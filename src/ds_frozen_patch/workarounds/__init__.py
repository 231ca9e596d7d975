"""Faults of other projects that this package works around: their cures are in one module per project."""
