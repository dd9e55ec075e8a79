"""A process of its own that opens an engine and says what that took: ``MODEL FIRST END SLOTS TOKENS CACHE``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from hotkv_trio.llama import LlamaEngine


def measure(model: Path, layers: tuple[int, int], n_slots: int, n_ctx: int, cache: Path) -> dict[str, float]:
    """Return bytes: accounted, reported by llama.cpp, and by how much the process's own memory grew."""
    engine = LlamaEngine(model, layers=layers, n_slots=n_slots, n_ctx=n_ctx, cache_dir=cache)
    before = _anonymous()
    info = engine.open()
    grown = _anonymous() - before
    context, _ = engine._open_context()
    reported = (sum(context._kv_sizes) + sum(context._state_sizes)) * 2**20
    engine.close()
    return {"accounted": n_slots * info.slot_bytes, "reported": reported, "resident": grown}


def _anonymous() -> int:
    """Return the bytes of memory that this process has for itself, without files that it maps."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"RssAnon:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    path, first, end, slots, tokens, folder = sys.argv[1:]
    print(json.dumps(measure(Path(path), (int(first), int(end)), int(slots), int(tokens), Path(folder))))  # ruff: ignore[print]
