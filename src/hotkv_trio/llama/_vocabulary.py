"""A model file's vocabulary: text to tokens and back, without the model's weights."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, final

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama import _ffi, _log

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt


@final
class Vocabulary:
    """The vocabulary of one file.  Any thread may call, also while another closes it.

    One that nobody closes is given back when nobody holds it any more.

    Args:
        path: a GGUF file; the vocabulary alone is loaded.

    Raises:
        InvalidInput: llama.cpp cannot load the file, or it holds no vocabulary.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lock = threading.Lock()
        self._name = str(path)
        self._model: int | None = None
        _ffi.start_up()
        with _log.collected_lines() as lines:
            model = _ffi.load_model(path, vocab_only=True)
        if model is None:
            raise InvalidInput(f"{path}: no vocabulary: {lines.why}")
        if not _ffi.has_text(model):
            _ffi.free_model(model)
            raise InvalidInput(f"{path}: the model has no vocabulary; it takes and gives numbers only")
        self._model = model
        self._free = weakref.finalize(self, _ffi.free_model, model)

    def __repr__(self) -> str:
        """Say the file, and whether it is closed."""
        return f"<{type(self).__name__} of {self._name}{', closed' if self._model is None else ''}>"

    def _loaded(self) -> int:
        if self._model is None:
            raise InvalidInput(f"{self._name}: the vocabulary is closed")
        return self._model

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> npt.NDArray[np.int32]:
        """Return the text's tokens, int32 (n,).

        Args:
            text: any text.
            add_special: whether the tokens that the model begins and ends with are added.
            parse_special: whether control tokens written in the text become tokens; not for text from elsewhere.

        Raises:
            InvalidInput: the vocabulary is closed, or the text has lone surrogates.
        """
        try:
            encoded = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(f"the text is not Unicode: {error}") from None
        with self._lock:
            return _ffi.tokenize(self._loaded(), encoded, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> bytes:
        """Return the bytes that tokens stand for: UTF-8, but a character may be cut at either end.

        Raises:
            InvalidInput: the vocabulary is closed, or a token is not in it.
        """
        # Before the lock is taken: what is iterated may be made of other calls to this vocabulary.
        numbers = [int(token) for token in tokens]
        with self._lock:
            model = self._loaded()
            n_vocab = _ffi.n_vocab(model)
            if wrong := [number for number in numbers if not 0 <= number < n_vocab]:
                raise InvalidInput(f"token {wrong[0]}: tokens are 0 to {n_vocab - 1}")
            return b"".join(_ffi.piece(model, number, special=special) for number in numbers)

    def is_end(self, token: int) -> bool:
        """Say whether a token ends a generation.

        Raises:
            InvalidInput: the vocabulary is closed.
        """
        with self._lock:
            model = self._loaded()
            return 0 <= token < _ffi.n_vocab(model) and _ffi.is_end(model, int(token))

    @property
    def n_vocab(self) -> int:
        """Tokens are 0 to ``n_vocab - 1``.

        Raises:
            InvalidInput: the vocabulary is closed.
        """
        with self._lock:
            return _ffi.n_vocab(self._loaded())

    @property
    def chat_template(self) -> str | None:
        """The file's own chat template (Jinja); None: it has none."""
        with self._lock:
            return _ffi.chat_template(self._loaded())

    def close(self) -> None:
        """Give it back.  Closing twice does nothing."""
        with self._lock:
            self._model = None
            self._free()
