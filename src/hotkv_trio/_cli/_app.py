"""The commands, and what becomes of their errors: one message that ends in what to do next, never a traceback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts import App, CycloptsError
from cyclopts.exceptions import UnusedCliTokensError

from hotkv_trio._cli._advice import noted_advice
from hotkv_trio._cli._cluster import cluster
from hotkv_trio._cli._doctor import doctor
from hotkv_trio._cli._generate import generate
from hotkv_trio._cli._inspect import inspect
from hotkv_trio._cli._output import new_console, plain
from hotkv_trio._cli._plan import plan
from hotkv_trio._cli._recipe import recipe
from hotkv_trio._cli._serve import serve
from hotkv_trio._cli._slice import slice_
from hotkv_trio._cli._top import top
from hotkv_trio._cli.bench._command import bench
from hotkv_trio._cli.demo._command import demo
from hotkv_trio._errors import EngineFailed, HotKVError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

NOT_DONE = 2
"""Exit status of a command that could not do its work."""


def version() -> str:
    """Return what is installed, in a line: this, llama.cpp with its commit, the tap that a shard takes."""
    from hotkv_trio.llama._installation import read_installation

    found = read_installation()
    ours, theirs = (found.packages[name] for name in ("hotkv-trio", "llama-cpp-python"))
    return f"hotkv-trio {ours}, llama.cpp {found.llama_cpp_commit} (llama-cpp-python {theirs}), {found.tap} tap"


app = App(
    name="hotkv-trio",
    help="Isolated llama.cpp sessions with hot KV caches, bounded in bytes, for trio.",
    version=version,
    backend="trio",
)
app.command(demo)
app.command(inspect)
app.command(plan)
app.command(slice_, name="slice")
app.command(recipe)
app.command(serve)
app.command(generate)
app.command(top)
app.command(cluster)
app.command(bench)
app.command(doctor)
app.register_install_completion_command()


def run(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name, and return its exit status."""
    errors = new_console(stderr=True)
    try:
        status = app(arguments, error_console=errors, exit_on_error=False, result_action="return_value")
    except CycloptsError as error:
        # It has been printed, with what would be right.
        advice = " ".join(("hotkv-trio", *(error.command_chain or ()), "--help says what there is."))
        if isinstance(error, UnusedCliTokensError):
            advice = f"write the name of its option before it, as --model FILE; {advice}"
        errors.print(f"Next: {advice}", markup=False, highlight=False, soft_wrap=True)
        return NOT_DONE
    except (HotKVError, OSError) as error:
        return _complain(errors, error)
    except BaseExceptionGroup as group:
        ours, others = group.split((HotKVError, OSError))
        if ours is None or others is not None:
            raise
        return _complain(errors, _first(ours))
    return status if isinstance(status, int) else 0


def _complain(console: Console, error: BaseException) -> int:
    if noted := noted_advice(error):
        advice = noted
    elif isinstance(error, EngineFailed):
        advice = "fewer sessions or tokens, which take less memory, or another model"
    elif isinstance(error, OSError):
        advice = "a file that can be read, and a folder for temporary files (TMPDIR) that is not full"
    else:
        advice = "another GGUF file, or none: hotkv-trio demo builds a tiny model of its own"
    # Text, not markup: a path may hold square brackets, and a server's message whatever it likes.
    for line in f"hotkv-trio: {error}\nNext: try {advice}.".splitlines():
        console.print(plain(line), style="red", soft_wrap=True)
    return NOT_DONE


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
