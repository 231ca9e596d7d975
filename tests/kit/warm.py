"""Imported once, by the process that ranks are forked from: every module that they need, without a process group."""

from __future__ import annotations

import gc

import setuptools  # noqa: F401  -- before DeepSpeed imports distutils: it takes its place, to build ops
import torch

from ds_frozen_patch.testing import cpu_strategy
from kit import cell
from kit.cell import CELL, FABRIC, TRAINER

torch.set_num_threads(1)
cell.work_around(CELL.needs)  # before what imports DeepSpeed
cpu_strategy(TRAINER)
cpu_strategy(FABRIC)

import kit.checkpoints  # noqa: E402, F401
from ds_frozen_patch import cli  # noqa: E402, F401

gc.collect()
gc.freeze()
