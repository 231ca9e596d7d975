"""Imported once, by the process that `forked` forks ranks from: all that a rank needs, and no process group yet."""

from __future__ import annotations

import gc

import crutches
import provider  # noqa: F401
import runs  # noqa: F401
import setuptools  # noqa: F401  -- before DeepSpeed imports distutils: it takes its place, to build ops
import tools_checkpoints  # noqa: F401
import torch
from under_test import CELL, FABRIC, TRAINER

from ds_frozen_patch import cli  # noqa: F401
from ds_frozen_patch.checkpoint import universal  # noqa: F401
from ds_frozen_patch.testing import cpu_strategy

torch.set_num_threads(1)
crutches.lend(CELL.needs)
cpu_strategy(TRAINER)
cpu_strategy(FABRIC)
gc.collect()
gc.freeze()
