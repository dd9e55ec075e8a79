"""``python -m hotkv_trio``: the command line."""

from __future__ import annotations

import sys

from hotkv_trio._cli import main

if __name__ == "__main__":
    sys.exit(main())
