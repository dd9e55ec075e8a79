"""The boundary tap: reads the hidden states that leave a shard's last layer.

llama.cpp shows every node of the graph to the ``cb_eval`` callback of a context's parameters.  A tap is such a
callback: it says yes to one tensor, named at creation, copies its rows, and leaves out the rest of the graph, which is
only the head that llama.cpp insists on.  Two kinds do the same: the *native* one, a small C++ library built with this
package, and the *Python* one, which serves where that library is missing and costs about a tenth of a small model's
decode step.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, final

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as ffi

from hotkv_trio._errors import EngineFailed, InvalidInput

if TYPE_CHECKING:
    from hotkv_trio._engine import Rows

TapKind: TypeAlias = Literal["native", "python"]
"""Which tap: the C++ library's, or the one in Python."""

ABI = 2
"""Of the native library that this module speaks to: ``HOTKV_TAP_ABI`` of ``hotkv_tap.h``."""

MAX_NAME = 64
"""Bytes of a tensor's name with its terminator: ``GGML_MAX_NAME``."""

_OK, _TOO_SMALL, _NOT_ROWS = range(3)
_WHY = {
    _TOO_SMALL: "the graph had more rows than were asked for",
    _NOT_ROWS: "it is not contiguous float32 rows of the width expected",
}


class _Ggml(ctypes.Structure):
    """``hotkv_tap_ggml``: what is to be known of a tensor is asked through these functions.

    Called from Python, those that only look something up keep the GIL: they run for every node of the graph.
    """

    _fields_ = (
        ("ggml_get_name", ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)),
        ("ggml_nbytes", ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)),
        ("ggml_element_size", ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)),
        ("ggml_is_contiguous", ctypes.PYFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)),
        (
            "ggml_backend_tensor_get",
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t),
        ),
    )


@functools.cache
def _ggml() -> _Ggml:
    """Return ggml's own functions, found in the library that llama-cpp-python has loaded."""
    return _Ggml(*(kind((name, ffi._lib)) for name, kind in _Ggml._fields_))


def native_path() -> Path | None:
    """Return where the native library lies, or None where it was not built."""
    # An editable installation has a second folder for what was compiled: __path__ knows both.
    for folder in sys.modules[__package__].__path__:
        for path in sorted(Path(folder, "_native").glob("libhotkv_tap.*")):
            return path
    return None


@functools.cache
def _native_library() -> ctypes.PyDLL:
    """Load the native library.

    Raises:
        OSError: it was not built, cannot be loaded, or is another version's.
    """
    path = native_path()
    if path is None:
        raise OSError("the native tap was not built")
    library = ctypes.PyDLL(str(path))
    if (abi := library.hotkv_tap_abi()) != ABI:
        raise OSError(f"the native tap has ABI {abi}, and {ABI} is needed")
    library.hotkv_tap_create.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(_Ggml)]
    library.hotkv_tap_create.restype = ctypes.c_void_p
    library.hotkv_tap_free.argtypes = [ctypes.c_void_p]
    library.hotkv_tap_free.restype = None
    library.hotkv_tap_begin.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.hotkv_tap_begin.restype = None
    size = ctypes.POINTER(ctypes.c_size_t)
    library.hotkv_tap_end.argtypes = [ctypes.c_void_p, size, size]
    library.hotkv_tap_end.restype = ctypes.c_int
    return library


class Tap(Protocol):
    """Takes the rows of one tensor, the last that anybody needs, call by call.

    ``callback`` and ``user_data`` go into the context's parameters (``cb_eval``, ``cb_eval_user_data``).  Then each
    call to llama.cpp is ``begin(n_rows)``, the call, ``rows()``.  A tap serves one context, and outlives it.
    """

    @property
    def kind(self) -> TapKind:
        """Which of the two this is."""
        ...

    @property
    def callback(self) -> Any:
        """The C function for ``cb_eval``."""
        ...

    @property
    def user_data(self) -> int | None:
        """The pointer for ``cb_eval_user_data``."""
        ...

    def begin(self, n_rows: int) -> None:
        """Expect ``n_rows`` rows from the next call to llama.cpp; 0: it gives none, and nothing is taken.

        Raises:
            InvalidInput: ``n_rows`` is negative or more than the tap was made for.
        """
        ...

    def rows(self) -> Rows:
        """Return what was taken since ``begin``, float32 (n_rows, n_embd), in an array that nobody writes to again.

        Raises:
            EngineFailed: more or fewer rows came than were asked for, or the tensor is not what it should be.
        """
        ...

    def close(self) -> None:
        """Give everything back.  The context must be gone before.  Closing twice does nothing."""
        ...


class _Base:
    """What both kinds share: the array that rows are taken into, and the check of what came.

    What runs between two decode steps runs with cold caches, and costs many times what a loop over it would say: so the
    array is made once, and its rows are copied.
    """

    def __init__(self, tensor_name: str, n_embd: int, max_rows: int) -> None:
        self._tensor_name = tensor_name
        self._row_bytes = 4 * n_embd
        self._max_rows = max_rows
        self._n_rows = 0
        # Of so many rows the last time, which is mostly so the next time.
        self._view: Rows = np.empty((0, n_embd), dtype=np.float32)
        self._array: Rows = np.empty((max_rows, n_embd), dtype=np.float32)
        self._address: int = self._array.ctypes.data

    def __repr__(self) -> str:
        """Say the kind and the tensor."""
        return f"<{type(self).__name__} of {self._tensor_name}>"

    def _expect(self, n_rows: int) -> None:
        if not 0 <= n_rows <= self._max_rows:
            raise InvalidInput(f"{n_rows} rows asked of a tap for 0 to {self._max_rows}")
        self._n_rows = n_rows

    def _checked(self, status: int, nbytes: int) -> Rows:
        if status != _OK:
            raise EngineFailed(None, f"tensor {self._tensor_name}: {_WHY[status]}")
        if nbytes != self._n_rows * self._row_bytes:
            came = nbytes // self._row_bytes
            raise EngineFailed(None, f"tensor {self._tensor_name}: {came} rows came where {self._n_rows} were expected")
        if len(self._view) != self._n_rows:
            self._view = self._array[: self._n_rows]
        return self._view.copy()


@final
class NativeTap(_Base):
    """The C++ library's tap.  Made by ``make_tap``."""

    kind: TapKind = "native"

    def __init__(self, tensor_name: str, n_embd: int, max_rows: int) -> None:
        """Make the native object.

        Raises:
            OSError: the library is missing or another version's.
            MemoryError: there is no memory for the native object.
        """
        super().__init__(tensor_name, n_embd, max_rows)
        library = _native_library()
        self.user_data: int | None = library.hotkv_tap_create(tensor_name.encode(), self._row_bytes, _ggml())
        if self.user_data is None:
            raise MemoryError("no memory for a native tap")
        self._begin, self._end, self._free = library.hotkv_tap_begin, library.hotkv_tap_end, library.hotkv_tap_free
        self._nbytes = ctypes.c_size_t()
        self._handle, self._buffer = ctypes.c_void_p(self.user_data), ctypes.c_void_p(self._address)
        self._end_arguments = self._handle, ctypes.byref(self._nbytes), None
        function = ctypes.cast(library.hotkv_tap_callback, ctypes.c_void_p).value
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(function)

    def begin(self, n_rows: int) -> None:
        """See ``Tap.begin``."""
        self._expect(n_rows)
        self._begin(self._handle, self._buffer if n_rows else None, n_rows * self._row_bytes)

    def rows(self) -> Rows:
        """See ``Tap.rows``."""
        return self._checked(self._end(*self._end_arguments), self._nbytes.value)

    def close(self) -> None:
        """See ``Tap.close``."""
        self._free(self.user_data)
        self.user_data = None


@final
class PythonTap(_Base):
    """The tap in Python.  Made by ``make_tap``."""

    kind: TapKind = "python"
    user_data: int | None = None

    def __init__(self, tensor_name: str, n_embd: int, max_rows: int) -> None:
        """Make the callback."""
        super().__init__(tensor_name, n_embd, max_rows)
        self._wanted = tensor_name.encode()
        self._open = False
        self._status = _OK
        self._taken = 0
        get_name = _ggml().ggml_get_name

        def callback(tensor: int, ask: bool, _user_data: int | None) -> bool:  # noqa: FBT001
            if not ask:
                self._status = self._take(tensor)
                return self._status != _OK  # What follows is the head, which nobody reads.
            return self._open and self._status == _OK and get_name(tensor) == self._wanted

        self.callback = llama_cpp.ggml_backend_sched_eval_callback(callback)

    def _take(self, tensor: int) -> int:
        ggml = _ggml()
        nbytes = ggml.ggml_nbytes(tensor)
        if ggml.ggml_element_size(tensor) != 4 or not ggml.ggml_is_contiguous(tensor) or nbytes % self._row_bytes:
            return _NOT_ROWS
        if nbytes > self._n_rows * self._row_bytes - self._taken:
            return _TOO_SMALL
        ggml.ggml_backend_tensor_get(tensor, self._address + self._taken, 0, nbytes)
        self._taken += nbytes
        return _OK

    def begin(self, n_rows: int) -> None:
        """See ``Tap.begin``."""
        self._expect(n_rows)
        self._open, self._status, self._taken = n_rows > 0, _OK, 0

    def rows(self) -> Rows:
        """See ``Tap.rows``."""
        self._open = False
        return self._checked(self._status, self._taken)

    def close(self) -> None:
        """See ``Tap.close``."""
        self._open = False


def make_tap(
    tensor_name: str, n_embd: int, max_rows: int, kind: TapKind | Literal["auto"] = "auto"
) -> NativeTap | PythonTap:
    """Make a tap for one tensor of one context.

    Args:
        tensor_name: as llama.cpp names it: ``l_out-14`` is what leaves layer 14.
        n_embd: width of its rows.
        max_rows: rows that one call gives at most.
        kind: ``auto`` takes the native one where it was built.

    Raises:
        InvalidInput: the name is empty or too long, a size is not positive, the kind is unknown, or the native tap was
            asked for and is not there.
    """
    if not 0 < len(tensor_name.encode()) < MAX_NAME or "\0" in tensor_name:
        raise InvalidInput(f"a tensor's name has 1 to {MAX_NAME - 1} bytes, not {tensor_name!r}")
    if n_embd < 1 or max_rows < 1:
        raise InvalidInput(f"a tap needs at least one row of at least one value, not {max_rows} of {n_embd}")
    if kind not in {"auto", "native", "python"}:
        raise InvalidInput(f"a tap is auto, native or python, not {kind!r}")
    if kind == "python":
        return PythonTap(tensor_name, n_embd, max_rows)
    try:
        return NativeTap(tensor_name, n_embd, max_rows)
    except OSError as error:
        if kind == "native":
            raise InvalidInput(f"no native tap: {error}; a Python one would do") from error
        return PythonTap(tensor_name, n_embd, max_rows)
