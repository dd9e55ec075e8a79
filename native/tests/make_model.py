"""Make the tiny model that the native tests run on: four layers, a few hundred kilobytes."""

from __future__ import annotations

import sys

from hotkv_trio.llama._tiny_gguf import build_tiny_gguf

build_tiny_gguf(sys.argv[1], "llama", seed=3, n_layer=4)
