"""Everything that touches llama.cpp or GGUF.  `LlamaEngine` is what most programs want."""

from __future__ import annotations

from hotkv_trio.llama._engine import Layout as Layout
from hotkv_trio.llama._engine import LlamaEngine as LlamaEngine
from hotkv_trio.llama._facts import KVType as KVType
from hotkv_trio.llama._vocabulary import Vocabulary as Vocabulary
