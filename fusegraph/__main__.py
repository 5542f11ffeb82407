"""``python -m fusegraph``."""

from __future__ import annotations

import sys

from fusegraph.cli import main

if __name__ == "__main__":
    sys.exit(main())
