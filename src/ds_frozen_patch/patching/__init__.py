"""Attaches the package to what is installed, and detaches it again."""
