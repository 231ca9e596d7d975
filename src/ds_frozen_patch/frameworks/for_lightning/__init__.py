"""Lightning as the owner of engines: its four packages, strategies, loops, paths and single files."""

from ...common.names import Names

NAMES = Names()
uses = NAMES.uses
STRATEGY = "DeepSpeedStrategy"
STRATEGY_OF_TRAINER = "Trainer's DeepSpeedStrategy"
"""What `uses` calls the strategies of Trainer and Fabric, and those of Trainer alone."""
