"""Embeddings looked up outside are llama.cpp's own, bit for bit."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

import gguf
import llama_cpp.llama_cpp as lib
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama._architectures import ARCHITECTURES
from hotkv_trio.llama._embedding import EmbeddingTable
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf
from tests.llama._files import split_gguf
from tests.llama._native import Native

if TYPE_CHECKING:
    from pathlib import Path

    from hotkv_trio.llama._tiny_gguf import Weights


@pytest.mark.parametrize("weights", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_fed_with_them_computes_what_it_does_with_tokens(tmp_path: Path, arch: str, weights: Weights) -> None:
    path = build_tiny_gguf(tmp_path / "m.gguf", arch, weights=weights)
    tokens = np.random.default_rng(1).integers(0, 512, 70).astype(np.int32)
    rows = EmbeddingTable(path).rows(tokens)
    assert rows.dtype == np.float32
    assert rows.flags.c_contiguous
    assert type(rows) is np.ndarray
    assert rows.flags.writeable
    with Native(path, n_seq=2) as model:
        assert np.array_equal(model.append((0, 0, tokens)), model.append((1, 0, rows)))


class _Traits(ctypes.Structure):
    _fields_: ClassVar = [
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("block_interleaved", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


STORED = [
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
]


@pytest.mark.parametrize("name", STORED)
def test_each_stored_type_is_dequantised_as_llama_cpp_does(name: str) -> None:
    kind = GGMLQuantizationType[name]
    native = ctypes.CDLL(lib._lib._name).ggml_get_type_traits
    native.restype, native.argtypes = ctypes.POINTER(_Traits), [ctypes.c_int]
    traits = native(kind.value).contents
    block, size = GGML_QUANT_SIZES[kind]
    assert (traits.type_name.decode().upper(), traits.block, traits.size) == (name, block, size)
    draw = np.random.default_rng(2)
    rows = draw.integers(0, 256, (300, size), dtype=np.uint8)
    expected = np.empty((300, block), np.float32)
    traits.to_float(rows.ctypes.data, expected.ctypes.data, expected.size)
    with np.errstate(all="ignore"):
        ours = gguf.dequantize(rows, kind)
    assert np.isfinite(expected).mean() > 0.8
    assert np.array_equal(ours, expected, equal_nan=True)


def test_a_split_model_has_the_same_table(tmp_path: Path) -> None:
    path = build_tiny_gguf(tmp_path / "m.gguf", weights="q8_0")
    tokens = np.arange(512, dtype=np.int32)
    whole = EmbeddingTable(path)
    parts = split_gguf(path, tmp_path / "parts", 3)
    assert np.array_equal(EmbeddingTable(parts[0]).rows(tokens), whole.rows(tokens))
    assert (whole.n_vocab, whole.n_embd) == (512, 128)
    assert "512 tokens, 128 wide, Q8_0" in repr(whole)


@pytest.mark.parametrize("tokens", [[-1], [3, 512], [2**31 - 1], [-(2**31)]])
def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path, tokens: list[int]) -> None:
    table = EmbeddingTable(build_tiny_gguf(tmp_path / "m.gguf"))
    with pytest.raises(InvalidInput, match="tokens are 0 to 511, not"):
        table.rows(np.array(tokens, np.int32))


def test_what_is_no_row_of_tokens_is_refused(tmp_path: Path) -> None:
    table = EmbeddingTable(build_tiny_gguf(tmp_path / "m.gguf"))
    with pytest.raises(InvalidInput, match=r"not int32 \(1, 2\)"):
        table.rows(np.array([[1, 2]], np.int32))
    with pytest.raises(InvalidInput, match="not float64"):
        table.rows(np.array([1.5]))
    assert table.rows(np.array([], np.int32)).shape == (0, 128)
