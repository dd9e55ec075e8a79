"""Where the command line begins: it says what to install where the extra ``cli`` is missing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXTRA = frozenset({"cyclopts", "rich"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        arguments: after the program's name; None: those of this process.
    """
    try:
        from hotkv_trio._cli._app import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        sys.stderr.write(
            f"hotkv-trio: the command line needs {missing}; run: pip install '.[cli]' in hotkv-trio's folder\n"
        )
        return 2
    return run(sys.argv[1:] if arguments is None else arguments)
