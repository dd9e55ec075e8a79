"""What every test stands on: native aborts end at once, without a debugger."""

from __future__ import annotations

import os

# Read by ggml when it aborts; set before anything imports llama_cpp.
os.environ["GGML_NO_BACKTRACE"] = "1"
