"""Slice a model of several GiB (its weights are holes in the file) and measure how far peak memory grew."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path

from tests.llama._files import sparse_gguf

from hotkv_trio.llama._slice import slice_gguf

LIMIT = 300
GIB, MIB = 1 << 30, 1 << 20


def peak() -> float:
    """Return the most memory that this process ever had resident, MiB."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) / 1024


def main() -> int:
    """Print; exit 1 if memory grew by 300 MiB or more."""
    with tempfile.TemporaryDirectory() as folder:
        source = sparse_gguf(Path(folder, "m.gguf"), n_layer=10, n_embd=4096, n_ff=12288)
        before, begun = peak(), time.monotonic()
        shard = slice_gguf(source, (0, 6), Path(folder, "s.gguf"))
        seconds, growth = time.monotonic() - begun, peak() - before
        print(
            f"model {source.stat().st_size / GIB:.2f} GiB,"
            f" shard of layers 0:6 {shard.stat().st_size / GIB:.2f} GiB, {seconds:.0f} s"
        )
        print(f"peak memory before {before:.1f} MiB, growth {growth:.1f} MiB (limit {LIMIT})")
    return 0 if growth < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
