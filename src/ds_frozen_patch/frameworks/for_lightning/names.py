"""The names of Lightning that are used, apart from those that are wrapped."""

from ...common.names import Names

NAMES = Names()
uses = NAMES.uses

STRATEGY = "DeepSpeedStrategy"
STRATEGY_OF_TRAINER = "Trainer's DeepSpeedStrategy"
"""The same of Trainer's strategy alone."""
