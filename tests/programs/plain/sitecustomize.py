"""On PYTHONPATH, a program under `ds-frozen-patch run --cpu` has its CPU ranks, but is not patched."""

import ds_frozen_patch

ds_frozen_patch.unpatch()
