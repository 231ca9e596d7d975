"""On PYTHONPATH, in place of the package: LLaMA-Factory imports it, and uses it for audio only."""
