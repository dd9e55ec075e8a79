"""The command line ``hotkv-trio``: one file or folder a command.  The library itself does not import this.

Exit status: 0 when all is as it should be, 1 when a command found something that is not, 2 when it could not do its
work (a wrong argument, a file that is no model, an engine that fails).
"""

from hotkv_trio._cli._main import main as main
