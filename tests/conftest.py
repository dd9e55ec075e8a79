"""What every test stands on: native aborts end at once, without a debugger, and Ctrl-C is what it is at a terminal."""

from __future__ import annotations

import os
import signal

# Read by ggml when it aborts; set before anything imports llama_cpp.
os.environ["GGML_NO_BACKTRACE"] = "1"

# A shell that starts a run in the background has it, and its children, ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
