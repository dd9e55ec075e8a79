"""Facts are read from headers alone, agree with llama.cpp, and no file can make reading them anything but a refusal."""

from __future__ import annotations

import math
import re
import struct
import time
from typing import TYPE_CHECKING

import attrs
import llama_cpp.llama_cpp as lib
import numpy as np
import pytest
from gguf.constants import GGUFValueType

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama._facts import model_facts, read_model_facts
from hotkv_trio.llama._gguf import MetaValue, read_gguf
from hotkv_trio.llama._tiny_gguf import TINY_ARCHITECTURES, build_tiny_gguf
from tests.llama._files import sparse_gguf, split_gguf
from tests.llama._native import Native

if TYPE_CHECKING:
    from pathlib import Path

MEMORY = (
    dict.fromkeys(["gemma3", "gpt-oss", "cohere2"], "sliding")
    | dict.fromkeys(["mamba", "mamba2"], "recurrent")
    | dict.fromkeys(["jamba", "falcon-h1", "granitehybrid", "lfm2"], "hybrid")
)


def logged_mib(log: str, what: str) -> float:
    return sum(float(size) for size in re.findall(what + r" buffer size = +([\d.]+) MiB", log))


@pytest.mark.parametrize("arch", TINY_ARCHITECTURES)
def test_facts_are_what_llama_cpp_says(tmp_path: Path, arch: str) -> None:
    path = build_tiny_gguf(tmp_path / "m.gguf", arch, n_layer=6)
    facts = read_model_facts(path)
    with Native(path, n_seq=2, n_ctx_seq=1024) as model:
        assert facts.n_layer == lib.llama_model_n_layer(model.model) == 6
        assert facts.n_embd == lib.llama_model_n_embd(model.model)
        assert facts.n_vocab == model.n_vocab
        assert facts.n_ctx_train == lib.llama_model_n_ctx_train(model.model)
        assert facts.n_swa == lib.llama_model_n_swa(model.model)
        assert (facts.memory == "recurrent") == lib.llama_model_is_recurrent(model.model)
        assert (facts.memory == "hybrid") == lib.llama_model_is_hybrid(model.model)
        log = model.log
    assert facts.memory == MEMORY.get(arch, "attention")
    assert facts.architecture == arch
    assert round(facts.kv_bytes_per_token() * 2048 / 2**20, 2) == pytest.approx(logged_mib(log, "KV"))
    assert round(facts.state_bytes() * 2 / 2**20, 2) == pytest.approx(logged_mib(log, "RS"))


def test_ranges_share_out_the_bytes_to_the_last_one(tmp_path: Path) -> None:
    facts = read_model_facts(build_tiny_gguf(tmp_path / "m.gguf", "jamba", n_layer=6))
    for cut in range(1, 6):
        for figure in (facts.kv_bytes_per_token, facts.state_bytes):
            assert figure((0, cut)) + figure((cut, 6)) == figure() == figure((0, 6))
    assert facts.kv_bytes_per_token((1, 2), "f16", "q8_0") == 64 * 2 + 64 // 32 * 34
    assert facts.kv_bytes_per_token((0, 1)) == 0
    assert facts.state_bytes((1, 2)) == 0


@pytest.mark.parametrize("layers", [(0, 0), (2, 1), (-1, 2), (0, 5), (4, 5)])
def test_a_range_beyond_the_model_is_refused(tmp_path: Path, layers: tuple[int, int]) -> None:
    facts = read_model_facts(build_tiny_gguf(tmp_path / "m.gguf"))
    with pytest.raises(InvalidInput, match=r"layers .* not a range of m\.gguf, which has layers 0:4"):
        facts.check_layers(layers)


def test_a_cache_type_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    facts = read_model_facts(build_tiny_gguf(tmp_path / "m.gguf", n_embd=48, n_ff=32))
    with pytest.raises(InvalidInput, match="24 elements is not a whole number of Q8_0 blocks of 32"):
        facts.kv_bytes_per_token(None, "f16", "q8_0")
    with pytest.raises(InvalidInput, match="iq4_nl, not 'int4'"):
        facts.kv_bytes_per_token(None, "int4")


def test_the_rope_of_the_file(tmp_path: Path) -> None:
    facts = read_model_facts(build_tiny_gguf(tmp_path / "m.gguf", "gemma3", n_layer=6))
    assert (facts.rope_freq_base, facts.rope_freq_scale) == (1e6, 1.0)
    assert facts.yarn == (0.0, 1.0, 32.0, 1.0, 4096.0)
    assert facts.sliding == (True, True, True, True, True, False)


def test_a_split_model_has_the_facts_of_the_whole(tmp_path: Path) -> None:
    whole = build_tiny_gguf(tmp_path / "m.gguf")
    parts = split_gguf(whole, tmp_path / "parts", 3)
    facts, expected = read_model_facts(parts[0]), read_model_facts(whole)
    assert facts.parts == tuple(parts)
    assert (facts.layer_bytes, facts.head_bytes, facts.n_vocab) == (
        expected.layer_bytes,
        expected.head_bytes,
        expected.n_vocab,
    )
    with Native(parts[0]) as model:
        assert model.n_vocab == facts.n_vocab


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = split_gguf(build_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "parts", 3)
    parts[1].unlink()
    with pytest.raises(InvalidInput, match=r"part m-00002-of-00003\.gguf of the split file is missing"):
        read_model_facts(parts[0])
    renamed = parts[0].rename(tmp_path / "parts" / "first.gguf")
    with pytest.raises(InvalidInput, match="one of 3 parts must be named"):
        read_model_facts(renamed)


def test_a_part_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    parts = split_gguf(build_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "parts", 2)
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(InvalidInput, match=r"split\.no does not say that this is part 2 of 2"):
        read_model_facts(parts[0])


def test_sixteen_gigabytes_take_no_time(tmp_path: Path) -> None:
    path = sparse_gguf(tmp_path / "huge.gguf", n_layer=20, n_embd=4096, n_ff=12288)
    assert path.stat().st_size > 16e9
    began = time.process_time()
    facts = read_model_facts(path)
    assert time.process_time() - began < 1
    assert sum(facts.layer_bytes) > 16e9


@pytest.mark.parametrize(
    "content, what",
    [
        (b"", "not a GGUF file"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04 a zip file, not a model", "not a GGUF file"),
        (b"GGUF", "truncated or damaged: the version"),
        (struct.pack("<4sI", b"GGUF", 1), "version 1 is not supported; versions 2 and 3 are"),
        (struct.pack(">4sI", b"GGUF", 3), "of the other byte order"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "the key general.architecture is missing"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "truncated or damaged: the name of tensor 0"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 62), "key 0 would be 4611686018427387904 bytes long"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 77), "the value of 'k' has the unknown type 77"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 9, 1), "an array of arrays"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 4, 1 << 29), "needs 2147483648, the file ends at"),
    ],
)
def test_foreign_and_damaged_files_are_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidInput) as refusal:
        read_model_facts(path)
    assert what in refusal.value.what
    assert str(path) in refusal.value.what


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        read_model_facts(tmp_path / "absent.gguf")
    with pytest.raises(InvalidInput, match="Is a directory"):
        read_model_facts(tmp_path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = build_tiny_gguf(tmp_path / "m.gguf", n_layer=1, n_vocab=40).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 4096, 7), *range(4096, len(content) - 32, 9973), len(content) - 33]:
        path.write_bytes(content[:length])
        with pytest.raises(InvalidInput):
            read_model_facts(path)


@pytest.mark.parametrize(
    "value",
    [
        MetaValue.of(GGUFValueType.STRING, "x"),
        MetaValue.of(GGUFValueType.STRING, ["a", "b", "c", "d"]),
        MetaValue.of(GGUFValueType.INT32, -1),
        MetaValue.of(GGUFValueType.UINT64, 2**63),
        MetaValue.of(GGUFValueType.UINT32, []),
        MetaValue.of(GGUFValueType.FLOAT32, math.nan),
        MetaValue.of(GGUFValueType.BOOL, True),
        MetaValue.of(GGUFValueType.INT32, [-1, 2, 3, 4]),
        MetaValue.of(GGUFValueType.FLOAT32, [0.5] * 4),
    ],
    ids=repr,
)
@pytest.mark.parametrize("arch", ["gemma3", "granite", "mamba", "jamba", "lfm2"])
def test_a_key_of_another_type_ends_in_facts_or_a_refusal(tmp_path: Path, arch: str, value: MetaValue) -> None:
    file = read_gguf(build_tiny_gguf(tmp_path / "m.gguf", arch, n_vocab=40))
    more = {f"{arch}.deepstack_mapping", f"{arch}.attention.sliding_window_pattern", "hotkv.shard"}
    refusals = []
    for key in sorted(file.metadata.keys() | more):
        try:
            facts = model_facts(attrs.evolve(file, metadata={**file.metadata, key: value}))
            assert 0 < facts.n_embd < 1 << 31
            assert facts.n_deepstack in range(facts.n_layer)
        except InvalidInput as refusal:
            refusals.append(refusal.what)
    assert len(refusals) > 5
    assert all(what.startswith(str(file.path)) for what in refusals)


def test_flipped_bits_end_in_facts_or_a_refusal(tmp_path: Path) -> None:
    content = bytearray(build_tiny_gguf(tmp_path / "m.gguf", n_layer=2, n_vocab=40).read_bytes())
    end = content.index(b"blk.1.ffn_up.weight") + 64
    draw = np.random.default_rng(0)
    path = tmp_path / "flipped.gguf"
    refusals = []
    for _ in range(800):
        damaged = bytearray(content)
        for _ in range(int(draw.integers(1, 4))):
            damaged[int(draw.integers(0, end))] ^= 1 << int(draw.integers(0, 8))
        path.write_bytes(damaged)
        try:
            read_model_facts(path)
        except InvalidInput as refusal:
            refusals.append(refusal.what)
    assert 300 < len(refusals) < 800
    assert all(what.startswith(str(path)) for what in refusals)
