"""The demo: `python -m ds_frozen_patch.demo`."""
