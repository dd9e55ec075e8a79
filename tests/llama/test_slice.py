"""Shard files: exact in every bit, made whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hotkv_trio._errors import InvalidInput
from hotkv_trio._sizes import size
from hotkv_trio.llama._architectures import ARCHITECTURES
from hotkv_trio.llama._facts import read_model_facts
from hotkv_trio.llama._gguf import MetaValue, encode_header, padded, read_gguf, tensor_chunks
from hotkv_trio.llama._slice import cached_slice, shard_weight_bytes, slice_gguf
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf
from tests.llama._files import sparse_gguf, split_gguf
from tests.llama._native import Native
from tests.llama._route import Shards, same

if TYPE_CHECKING:
    from pathlib import Path

    from hotkv_trio.llama._tiny_gguf import Weights
    from tests.llama._native import Rows

LONGER = {"cohere2": 6, "gemma3": 6, "gpt-oss": 6, "granitehybrid": 6, "jamba": 6, "lfm2": 6, "smollm3": 9}
"""Layers, where four would not show all."""
QUICK = {"llama", "qwen3moe", "gemma3", "granite", "lfm2"}
"""Architectures whose quantised models are in the default run; the others' are in the slow one."""
Q8_0 = 8


# Exactness


@pytest.mark.parametrize(
    "arch, weights, kv_type",
    [(arch, "f32", 1) for arch in ARCHITECTURES]
    + [pytest.param(arch, "q8_0", Q8_0, marks=[] if arch in QUICK else pytest.mark.slow) for arch in ARCHITECTURES],
)
def test_shards_compute_what_the_uncut_model_does(tmp_path: Path, arch: str, weights: Weights, kv_type: int) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf", arch, weights=weights, n_layer=LONGER.get(arch, 4))
    with Shards(source, tmp_path, kv_type=kv_type) as shards:
        check_routes(shards, shards.run_uncut())


def check_routes(shards: Shards, expected: list[Rows]) -> None:
    """Hold every route of two and of three shards to the uncut model's rows."""
    routes = list(shards.routes(2, 3))
    assert {len(route) for route in routes} == {2, 3}
    for route in routes:
        assert same(shards.run(route), expected), route


def with_value(source: Path, out: Path, key: str, value: float) -> Path:
    """Copy a model with a value of its metadata set."""
    file = read_gguf(source)
    entries = ((t.name, t.shape, t.type) for t in file.tensors.values())
    header = encode_header({**file.metadata, key: MetaValue.guess(value)}, entries)
    out.write_bytes(header + source.read_bytes()[next(iter(file.tensors.values())).offset :])
    return out


@pytest.mark.parametrize(
    "arch, key, value",
    [
        ("llama", "llama.attention.sliding_window", 32),
        ("llama", "llama.rope.freq_base", 1e6),
        ("gemma3", "gemma3.attention.sliding_window_pattern", 3),
        ("gemma3", "gemma3.attention.sliding_window", 0),
        ("minicpm", "minicpm.residual_scale", 0.5),
        ("granite", "granite.embedding_scale", 0.0),
    ],
)
def test_what_the_file_states_holds_in_every_shard(tmp_path: Path, arch: str, key: str, value: float) -> None:
    """A llama with a window is what Mistral's files are: llama.cpp ignores it, whole or cut."""
    plain = build_tiny_gguf(tmp_path / "m.gguf", arch)
    source = with_value(plain, tmp_path / "v.gguf", key, value)
    with Shards(source, tmp_path) as shards, Shards(plain, tmp_path) as others:
        expected = shards.run_uncut()
        assert same(expected, others.run_uncut()) == (key == "llama.attention.sliding_window")
        check_routes(shards, expected)


def test_a_tied_head_stays_with_the_last_shard(tmp_path: Path) -> None:
    whole = read_gguf(build_tiny_gguf(tmp_path / "m.gguf", "granite"))
    last = read_gguf(slice_gguf(tmp_path / "m.gguf", (2, 4), tmp_path / "s.gguf"))
    assert last.tensors["token_embd.weight"].shape == whole.tensors["token_embd.weight"].shape
    assert "output.weight" not in last.tensors


def with_tensor(source: Path, out: Path, name: str, values: np.ndarray) -> Path:
    """Copy a model with a float32 tensor more."""
    file = read_gguf(source)
    kind = file.tensors["output_norm.weight"].type
    entries = [(t.name, t.shape, t.type) for t in file.tensors.values()]
    with out.open("wb") as copy:
        copy.write(encode_header(file.metadata, [*entries, (name, values.shape, kind)]))
        for tensor in file.tensors.values():
            for chunk in tensor_chunks(tensor):
                copy.write(chunk)
            copy.write(bytes(padded(tensor.n_bytes, 32) - tensor.n_bytes))
        copy.write(values.astype(np.float32).tobytes())
        copy.write(bytes(padded(values.size * 4, 32) - values.size * 4))
    return out


@pytest.mark.parametrize(
    "arch, names",
    [("llama", ["rope_freqs.weight"]), ("phi3", ["rope_factors_long.weight", "rope_factors_short.weight"])],
)
def test_rope_factors_go_into_every_shard(tmp_path: Path, arch: str, names: list[str]) -> None:
    source = plain = build_tiny_gguf(tmp_path / "m.gguf", arch)
    for i, name in enumerate(names):
        source = with_tensor(source, tmp_path / f"r{i}.gguf", name, np.linspace(1, 8 + i, 32))
    with Shards(source, tmp_path) as shards, Shards(plain, tmp_path) as others:
        expected = shards.run_uncut()
        assert not same(expected, others.run_uncut())
        check_routes(shards, expected)


def test_a_split_source_gives_the_same_shard(tmp_path: Path) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf")
    parts = split_gguf(source, tmp_path / "parts", 3)
    for layers in [(0, 2), (2, 4)]:
        shard = slice_gguf(source, layers, tmp_path / "a.gguf").read_bytes()
        assert slice_gguf(parts[0], layers, tmp_path / "b.gguf").read_bytes() == shard


def test_bytes_are_shared_out_and_are_llama_cpps_own(tmp_path: Path) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf", n_layer=8, n_embd=256, n_head=4, n_head_kv=2)
    facts = read_model_facts(source)
    for layers in [(0, 3), (3, 4), (4, 8)]:
        path = slice_gguf(source, layers, tmp_path / "s.gguf")
        with Native(path, n_ctx_seq=8192) as shard:
            log = shard.log
        logged = {
            what: sum(float(mib) for mib in re.findall(rf"{what} buffer size = +([\d.]+) MiB", log))
            for what in ("model", "KV")
        }
        kv = facts.kv_bytes_per_token(layers)
        assert kv * facts.n_layer == facts.kv_bytes_per_token() * (layers[1] - layers[0])
        assert logged["KV"] == round(kv * 8192 / 2**20, 2)
        assert logged["model"] == pytest.approx(shard_weight_bytes(source, layers) / 2**20, abs=0.01)
        assert read_model_facts(path).kv_bytes_per_token() == kv
        assert shard_weight_bytes(path, None) == shard_weight_bytes(source, layers)


def test_a_shard_says_what_it_is_and_is_not_cut_again(tmp_path: Path) -> None:
    path = slice_gguf(build_tiny_gguf(tmp_path / "m.gguf"), (1, 3), tmp_path / "s.gguf")
    assert read_model_facts(path).shard == (1, 3)
    with pytest.raises(InvalidInput, match=r"s\.gguf is a shard \(layers 1:3\): give the whole model"):
        slice_gguf(path, (0, 1), tmp_path / "t.gguf")


def test_values_by_layer_are_cut_to_the_range(tmp_path: Path) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf", "jamba", n_layer=6)
    shard = read_gguf(slice_gguf(source, (2, 6), tmp_path / "s.gguf"))
    assert shard.metadata["jamba.attention.head_count_kv"].decode() == [0, 1, 0, 1]
    assert shard.metadata["jamba.block_count"].decode() == 4
    assert not any(key.startswith("tokenizer.ggml.tokens") for key in shard.metadata)


# Made whole or not at all


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".part")


def test_progress_ends_with_everything(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = build_tiny_gguf(tmp_path / "m.gguf")
    path = slice_gguf(source, (0, 2), tmp_path / "s.gguf", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (path.stat().st_size,) * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_one_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf")
    out = tmp_path / "s.gguf"
    out.write_bytes(b"before")

    def interrupt(done: int, total: int) -> None:
        raise error

    with pytest.raises(error):
        slice_gguf(source, (0, 2), out, interrupt)
    assert out.read_bytes() == b"before"
    assert leftovers(tmp_path) == []


def test_too_little_space_is_said_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf")
    needed = size(slice_gguf(source, (0, 2), tmp_path / "s.gguf").stat().st_size)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 12345, 12345))
    with pytest.raises(InvalidInput, match=re.escape(f"the shard takes {needed}, and 12,345 B (12.1 KiB) are free")):
        slice_gguf(source, (0, 2), tmp_path / "t.gguf")
    assert not (tmp_path / "t.gguf").exists()


def child(code: str, *arguments: object, limits: tuple[int, int] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, perhaps under a resource limit."""
    before = None if limits is None else (lambda: resource.setrlimit(limits[0], (limits[1], limits[1])))
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=before, timeout=120)


SLICE = """
    import sys
    from hotkv_trio import _errors
    from hotkv_trio.llama import _slice
    try:
        print(_slice.cached_slice(sys.argv[1], (0, 2), sys.argv[2]))
    except _errors.InvalidInput as refusal:
        sys.exit(refusal.what)
"""


def test_a_disk_that_fills_up_meanwhile_ends_in_a_clear_error(tmp_path: Path) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf")
    cached_slice(source, (2, 4), tmp_path / "c")
    done = child(SLICE, source, tmp_path / "c", limits=(resource.RLIMIT_FSIZE, 400_000))
    assert done.returncode == 1
    assert re.search(r"File too large \(the shard takes 9[\d,]+ B \([\d.]+ KiB\), and .* were free\)", done.stderr)
    assert leftovers(tmp_path / "c") == []
    assert len(list((tmp_path / "c").glob("*.gguf"))) == 1


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(InvalidInput, match="No such file or directory"):
        slice_gguf(source, (0, 2), tmp_path / "absent" / "s.gguf")
    with pytest.raises(InvalidInput, match="Not a directory"):
        cached_slice(source, (0, 2), source / "cache")


def test_the_model_itself_is_never_written_over(tmp_path: Path) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf")
    before = source.read_bytes()
    (tmp_path / "link.gguf").symlink_to(source)
    for out in (source, tmp_path / "link.gguf"):
        with pytest.raises(InvalidInput, match="is the model itself"):
            slice_gguf(source, (0, 2), out)
    assert source.read_bytes() == before


@pytest.mark.parametrize("cached", [False, True])
def test_a_source_cut_short_meanwhile_is_refused(tmp_path: Path, cached: bool) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf")
    folder = tmp_path / "c"
    folder.mkdir()

    def cut(done: int, total: int) -> None:
        os.truncate(source, 300_000)

    make, out = (cached_slice, folder) if cached else (slice_gguf, folder / "s.gguf")
    with pytest.raises(InvalidInput, match=r"m\.gguf: truncated"):
        make(source, (0, 2), out, cut)
    assert list(folder.glob("*.gguf")) == []
    assert leftovers(folder) == []


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(InvalidInput, match="changed while it was read"):
        slice_gguf(source, (0, 2), tmp_path / "s.gguf", lambda done, _: os.utime(source, ns=(done, done)))
    assert not (tmp_path / "s.gguf").exists()


# The cache


def made(path: Path) -> tuple[int, int]:
    """Return what tells one making of a file from another."""
    state = path.stat()
    return state.st_ino, state.st_mtime_ns


def test_a_cached_shard_is_made_once(tmp_path: Path) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf")
    path = cached_slice(source, (0, 2), tmp_path / "c")
    first = made(path)
    assert path.read_bytes() == slice_gguf(source, (0, 2), tmp_path / "s.gguf").read_bytes()
    assert cached_slice(source, (0, 2), tmp_path / "c") == path
    assert made(path) == first
    assert cached_slice(source, (2, 4), tmp_path / "c") != path
    copy = shutil.copy(source, tmp_path / "copy.gguf")
    assert cached_slice(copy, (0, 2), tmp_path / "c") == path


def test_the_users_cache_is_where_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = cached_slice(build_tiny_gguf(tmp_path / "m.gguf"), (0, 2))
    assert path.parent == tmp_path / "xdg" / "hotkv-trio" / "shards"


def test_other_metadata_over_the_same_tensors_is_another_shard(tmp_path: Path) -> None:
    one = build_tiny_gguf(tmp_path / "a.gguf", n_ctx_train=1024)
    other = build_tiny_gguf(tmp_path / "b.gguf", n_ctx_train=2048)
    paths = [cached_slice(source, (0, 2), tmp_path / "c") for source in (one, other)]
    assert [read_model_facts(path).n_ctx_train for path in paths] == [1024, 2048]


@pytest.mark.parametrize("damage", ["cut", "byte", "empty", "gone", "no seal", "bad seal", "header"])
def test_a_damaged_one_is_made_again(tmp_path: Path, damage: str) -> None:
    source = build_tiny_gguf(tmp_path / "m.gguf")
    path = cached_slice(source, (0, 2), tmp_path / "c")
    good, seal = path.read_bytes(), path.with_suffix(".seal")
    if damage == "cut":
        os.truncate(path, len(good) - 1)
    elif damage == "byte":
        path.write_bytes(good[:-100] + b"!" + good[-99:])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "gone":
        path.unlink()
    elif damage == "no seal":
        seal.unlink()
        path.write_bytes(b"x" * len(good))
    elif damage == "bad seal":
        seal.write_bytes(b"\xff[")
        path.write_bytes(b"x" * len(good))
    elif damage == "header":
        state = path.stat()
        path.write_bytes(b"x" * len(good))
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert cached_slice(source, (0, 2), tmp_path / "c") == path
    assert path.read_bytes() == good


STALLED = """
    import os, sys, time
    from hotkv_trio.llama import _slice, _gguf
    _gguf.CHUNK = 4096
    def stall(done, total):
        if done > total // 2 and not os.path.exists(sys.argv[3]):
            open(sys.argv[3], "w").close()
            time.sleep(60)
    _slice.file_digest = lambda file, progress: "0" * 64
    print(_slice.cached_slice(sys.argv[1], (0, 2), sys.argv[2], stall))
"""


def stalled(source: Path, folder: Path, mark: Path) -> subprocess.Popen[str]:
    """Start a process that slices, and stops in the middle of it until ``mark`` is there; wait for the middle."""
    command = [sys.executable, "-c", textwrap.dedent(STALLED), str(source), str(folder), str(mark)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not mark.exists():
        assert process.poll() is None
    return process


def test_killed_in_the_middle_leaves_no_shard_and_the_next_try_is_clean(tmp_path: Path) -> None:
    source, folder, mark = build_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "c", tmp_path / "mark"
    with stalled(source, folder, mark) as process:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(folder.glob("*.gguf")) == []
    assert len(leftovers(folder)) == 1
    retried = child(STALLED, source, folder, mark)
    assert retried.returncode == 0, retried.stderr
    (path,) = folder.glob("*.gguf")
    assert leftovers(folder) == []
    assert path.read_bytes() == slice_gguf(source, (0, 2), tmp_path / "s.gguf").read_bytes()


def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    source, folder = build_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "c"
    racing = """
        import os, sys
        from hotkv_trio.llama import _slice
        write = _slice._write
        def counted(shard, target, progress):
            write(shard, target, progress)
            print("made")
        _slice._write = counted
        print("there", flush=True)
        while not os.path.exists(sys.argv[3]):
            pass
        print(_slice.cached_slice(sys.argv[1], (0, 2), sys.argv[2]))
    """
    command = [sys.executable, "-c", textwrap.dedent(racing), str(source), str(folder), str(tmp_path / "go")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
    (tmp_path / "go").touch()
    printed = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sorted(map(len, printed)) == [1, 1, 1, 2]
    assert {lines[-1] for lines in printed} == {str(next(folder.glob("*.gguf")))}
    assert leftovers(folder) == []


def test_a_waiter_takes_over_from_one_that_was_killed(tmp_path: Path) -> None:
    source, folder, mark = build_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "c", tmp_path / "mark"
    with stalled(source, folder, mark) as first:
        command = [sys.executable, "-c", textwrap.dedent(STALLED), str(source), str(folder), str(mark)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiter:
            with pytest.raises(subprocess.TimeoutExpired):
                waiter.wait(0.7)
            first.kill()
            first.communicate()
            path = waiter.communicate(timeout=60)[0].strip()
    assert waiter.returncode == 0
    assert read_model_facts(path).shard == (0, 2)
    assert leftovers(folder) == []


# Memory

MEASURED = """
    import re, sys
    from hotkv_trio.llama import _slice
    peak = lambda: int(re.search("VmHWM: *\\t* *(\\d+)", open("/proc/self/status").read())[1])
    before = peak()
    path = _slice.slice_gguf(sys.argv[1], (0, int(sys.argv[3])), sys.argv[2])
    print(peak() - before, path.stat().st_size)
"""


linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by Linux's own account")


def slice_growth(source: Path, out: Path, n_layer: int) -> tuple[float, float]:
    """Slice in a process of its own; return how far its peak memory grew, and the shard's size, in MiB."""
    done = child(MEASURED, source, out, n_layer)
    out.unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    kib, size = map(int, done.stdout.split())
    return kib / 2**10, size / 2**20


@linux
def test_memory_stays_flat(tmp_path: Path) -> None:
    source = sparse_gguf(tmp_path / "m.gguf", n_layer=3, n_embd=2048, n_ff=6144)
    growth, size = slice_growth(source, tmp_path / "s.gguf", 1)
    assert size > 200
    assert growth < 50


@linux
@pytest.mark.slow
def test_memory_stays_flat_over_gigabytes(tmp_path: Path) -> None:
    source = sparse_gguf(tmp_path / "m.gguf", n_layer=10, n_embd=4096, n_ff=12288)
    growth, size = slice_growth(source, tmp_path / "s.gguf", 6)
    assert size > 4000
    assert growth < 300
