"""The main job, to be read from top to bottom: `base`, `record`, `save`, `load`."""
