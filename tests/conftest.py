"""What every test stands on: the same examples each time, native aborts that end at once, Ctrl-C as at a terminal."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Generator

# Read by ggml when it aborts; set before anything imports llama_cpp.
os.environ["GGML_NO_BACKTRACE"] = "1"

# A shell that starts a run in the background has it, and its children, ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, also on the pages whose code is run.
settings.register_profile("default-tests", derandomize=True, database=None)
settings.load_profile("default-tests")


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Keep what tests, and the processes that they start, make out of the user's own directories."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patched.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        yield
