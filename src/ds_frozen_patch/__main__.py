"""`python -m ds_frozen_patch` is the command `ds-frozen-patch`."""

import sys

from .cli import main

sys.exit(main())
