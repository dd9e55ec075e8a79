"""Real models: files in the folder that HOTKV_MODELS names.  Nothing here runs by default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma3-270m.gguf"


@pytest.fixture(scope="session")
def models() -> Path:
    """Return the folder of real models."""
    folder = os.environ.get("HOTKV_MODELS")
    if not folder:
        pytest.fail(f"HOTKV_MODELS names no folder; it should hold {SMOLLM2} and {GEMMA3}")
    return Path(folder)
