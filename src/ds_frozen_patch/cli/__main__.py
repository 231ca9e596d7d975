"""`python -m ds_frozen_patch.cli`."""

import sys

from . import main

sys.exit(main())
