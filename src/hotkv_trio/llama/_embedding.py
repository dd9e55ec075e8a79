"""The token embeddings of a model file, looked up outside llama.cpp: a shard's file carries none.

Rows come from a memory map of the source and are dequantised one by one, so a table of gigabytes costs the pages that
are touched, and nothing is copied but the rows asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np
from gguf import dequantize

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama._architectures import embedding_factor
from hotkv_trio.llama._facts import EMBEDDING, model_facts
from hotkv_trio.llama._gguf import read_gguf

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

    from hotkv_trio._engine import Rows


@final
class EmbeddingTable:
    """What llama.cpp would look up for a token, bit for bit, as the first shard of the model expects it.

    The file stays mapped until the table is dropped; it must not be cut short before.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map the embeddings of a whole model (any part of it, if it is split).

        Raises:
            InvalidInput: the file is missing, foreign or damaged, or its architecture cannot be served by ranges.
        """
        file = read_gguf(path)
        facts = model_facts(file)
        self._factor = embedding_factor(facts)
        tensor = file.tensors.get(EMBEDDING)
        if tensor is None or tensor.shape[0] != facts.n_embd:
            raise InvalidInput(f"{file.path}: no {EMBEDDING} of rows of {facts.n_embd}")
        self._type = tensor.type
        table = np.memmap(tensor.path, np.uint8, "r", tensor.offset, (tensor.n_rows, tensor.row_bytes))
        self._bytes: npt.NDArray[np.uint8] = np.asarray(table)
        self.n_vocab = facts.n_vocab
        """Tokens are 0 to ``n_vocab - 1``."""
        self.n_embd = facts.n_embd
        """Width of a row."""

    def __repr__(self) -> str:
        """Say how large the table is, and how it is stored."""
        return f"<EmbeddingTable of {self.n_vocab} tokens, {self.n_embd} wide, {self._type.name} at {id(self):#x}>"

    def rows(self, tokens: npt.NDArray[np.int32]) -> Rows:
        """Return the embeddings of tokens: int32 (n,) to float32 (n, n_embd), C-contiguous and the caller's own.

        Raises:
            InvalidInput: a token is not in the vocabulary.
        """
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InvalidInput(f"tokens are integers of one dimension, not {tokens.dtype} {tokens.shape}")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.n_vocab:
            raise InvalidInput(f"tokens are 0 to {self.n_vocab - 1}, not {tokens.min()} to {tokens.max()}")
        rows: Rows = dequantize(self._bytes[tokens], self._type)
        return rows if self._factor == 1 else rows * self._factor
