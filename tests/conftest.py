"""What every test stands on: the same examples each time, native aborts that end at once, Ctrl-C as at a terminal."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# Read by ggml when it aborts; set before anything imports llama_cpp.
os.environ["GGML_NO_BACKTRACE"] = "1"

# A shell that starts a run in the background has it, and its children, ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, also on the pages whose code is run.
settings.register_profile("default-tests", derandomize=True, database=None)
settings.load_profile("default-tests")
