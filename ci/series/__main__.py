"""`python ci/series`: works with any Python that has `packaging`, from any folder."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from series.commands import main  # noqa: E402

if __name__ == "__main__":
    main()
