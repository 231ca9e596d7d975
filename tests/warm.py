"""Imported once, by the process that ranks are forked from: every module that they need, without a process group."""

from __future__ import annotations

import gc

import provider  # noqa: F401
import setuptools  # noqa: F401  -- before DeepSpeed imports distutils: it takes its place, to build ops
import torch
import workarounds
from under_test import CELL, FABRIC, TRAINER

from ds_frozen_patch.testing import cpu_strategy

torch.set_num_threads(1)
workarounds.apply(CELL.needs)  # before what imports DeepSpeed
cpu_strategy(TRAINER)
cpu_strategy(FABRIC)

import runs  # noqa: E402, F401
import tools_checkpoints  # noqa: E402, F401

from ds_frozen_patch import cli  # noqa: E402, F401

gc.collect()
gc.freeze()
