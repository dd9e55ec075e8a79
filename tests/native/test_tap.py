"""Both taps, through a real context on a tiny model: the same rows, the same refusals."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Literal

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest

from hotkv_trio._errors import EngineFailed, InvalidInput
from hotkv_trio.llama import _tap
from hotkv_trio.llama._tap import NativeTap, PythonTap, make_tap
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hotkv_trio._engine import Rows

N_EMBD = 128
N_UBATCH = 16
KINDS = ("native", "python")
Kind = Literal["native", "python"]


class Graph:
    """A context of a tiny model with a tap in it."""

    def __init__(self, model: Any, tap: NativeTap | PythonTap) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 256, 64, N_UBATCH
        params.n_threads = params.n_threads_batch = 1
        params.cb_eval = tap.callback
        params.cb_eval_user_data = tap.user_data
        self.context = lib.llama_init_from_model(model, params)
        assert self.context
        self.tap = tap
        self.length = 0

    def append(self, n: int) -> None:
        """Append n tokens, which follow from the length."""
        tokens = (lib.llama_token * n)(*(3 + 7 * (self.length + i) % 200 for i in range(n)))
        # Every token gives a row, as behind a shard.
        batch = lib.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i in range(n):
                batch.token[i], batch.pos[i] = tokens[i], self.length + i
                batch.n_seq_id[i], batch.logits[i] = 1, 1
                batch.seq_id[i][0] = 0
            assert lib.llama_decode(self.context, batch) == 0
        finally:
            lib.llama_batch_free(batch)
        self.length += n

    def rows(self, n: int) -> Rows:
        """Append n tokens and return what the tap took."""
        self.tap.begin(n)
        self.append(n)
        return self.tap.rows()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path: Path = build_tiny_gguf(tmp_path_factory.mktemp("tap") / "tiny.gguf", n_embd=N_EMBD)
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    loaded = lib.llama_model_load_from_file(str(path).encode(), params)
    assert loaded
    yield loaded
    lib.llama_model_free(loaded)


@pytest.fixture
def graph(model: Any) -> Iterator[Callable[..., Graph]]:
    made: list[Graph] = []

    def make(kind: Kind, *, name: str = "l_out-1", n_embd: int = N_EMBD) -> Graph:
        made.append(Graph(model, make_tap(name, n_embd, 64, kind)))
        return made[-1]

    yield make
    for one in made:
        lib.llama_free(one.context)
        one.tap.close()
        one.tap.close()


def test_native_tap_is_built_and_is_the_default() -> None:
    tap = make_tap("l_out-0", N_EMBD, 1)
    assert tap.kind == "native"
    assert "l_out-0" in repr(tap)
    tap.close()


def test_both_kinds_take_the_same_rows(graph: Callable[..., Graph]) -> None:
    native, python = graph("native"), graph("python")
    for n in (1, 8, N_UBATCH, 2 * N_UBATCH + 3, 1, 1):
        a, b = native.rows(n), python.rows(n)
        assert a.shape == b.shape == (n, N_EMBD)
        assert a.dtype == b.dtype == np.float32
        assert np.isfinite(a).all()
        assert a.any(axis=1).all()
        assert np.array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_nobody_elses(graph: Callable[..., Graph], kind: Kind) -> None:
    one = graph(kind)
    first = one.rows(4)
    before = first.copy()
    second = one.rows(4)
    # A call without a begin writes to neither.
    kept = second.copy()
    one.append(4)
    assert np.array_equal(first, before)
    assert np.array_equal(second, kept)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_taken_where_nothing_is_asked_for(graph: Callable[..., Graph], kind: Kind) -> None:
    one = graph(kind)
    assert one.rows(3).shape == (3, N_EMBD)
    one.tap.begin(0)
    one.append(3)
    assert one.tap.rows().shape == (0, N_EMBD)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("appended", [5, 2 * N_UBATCH])
def test_more_rows_than_asked_for_are_refused(graph: Callable[..., Graph], kind: Kind, appended: int) -> None:
    one = graph(kind)
    one.tap.begin(4)
    one.append(appended)
    with pytest.raises(EngineFailed, match="more rows than were asked for"):
        one.tap.rows()
    assert one.rows(2).shape == (2, N_EMBD)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_rows_than_asked_for_are_refused(graph: Callable[..., Graph], kind: Kind) -> None:
    one = graph(kind)
    one.tap.begin(4)
    one.append(3)
    with pytest.raises(EngineFailed, match="3 rows came where 4 were expected"):
        one.tap.rows()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_another_width_is_refused(graph: Callable[..., Graph], kind: Kind) -> None:
    one = graph(kind, n_embd=N_EMBD + 1)
    one.tap.begin(4)
    one.append(4)
    with pytest.raises(EngineFailed, match="width expected"):
        one.tap.rows()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_the_graph_has_not_is_noticed(graph: Callable[..., Graph], kind: Kind) -> None:
    one = graph(kind, name="l_out-99")
    one.tap.begin(1)
    one.append(1)
    with pytest.raises(EngineFailed, match="0 rows came where 1 were expected"):
        one.tap.rows()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_rows", [-1, 9])
def test_rows_beyond_the_maximum_are_refused(kind: Kind, n_rows: int) -> None:
    tap = make_tap("l_out-1", N_EMBD, 8, kind)
    with pytest.raises(InvalidInput, match="0 to 8"):
        tap.begin(n_rows)
    tap.close()


@pytest.mark.parametrize(
    "arguments",
    [("", 8, 8), ("x" * 64, 8, 8), ("a\0b", 8, 8), ("l_out-1", 0, 8), ("l_out-1", 8, 0), ("l_out-1", 8, 8, "gpu")],
)
def test_bad_arguments_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidInput):
        make_tap(*arguments)


class TestWithoutTheNativeLibrary:
    @pytest.fixture(autouse=True)
    def _uncached(self) -> Iterator[None]:
        _tap._native_library.cache_clear()
        yield
        _tap._native_library.cache_clear()

    def test_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_tap, "native_path", lambda: None)
        assert make_tap("l_out-1", 8, 8).kind == "python"
        with pytest.raises(InvalidInput, match="was not built"):
            make_tap("l_out-1", 8, 8, "native")

    def test_not_a_library(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        broken = tmp_path / "libhotkv_tap.so"
        broken.write_bytes(b"\0" * 100)
        monkeypatch.setattr(_tap, "native_path", lambda: broken)
        assert make_tap("l_out-1", 8, 8).kind == "python"
        with pytest.raises(InvalidInput, match="no native tap"):
            make_tap("l_out-1", 8, 8, "native")

    def test_of_another_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_tap, "ABI", _tap.ABI + 1)
        assert make_tap("l_out-1", 8, 8).kind == "python"
        with pytest.raises(InvalidInput, match="ABI"):
            make_tap("l_out-1", 8, 8, "native")


def test_a_native_tap_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library says NULL; the loader must not hand that to llama.cpp."""
    library = _tap._native_library()
    monkeypatch.setattr(library, "hotkv_tap_create", lambda *_: None)
    with pytest.raises(MemoryError):
        make_tap("l_out-1", 8, 8)


def test_ggml_functions_are_those_of_the_loaded_library() -> None:
    address = ctypes.cast(_tap._ggml().ggml_nbytes, ctypes.c_void_p).value
    assert address == ctypes.cast(lib._lib.ggml_nbytes, ctypes.c_void_p).value
