"""``hotkv-trio inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import attrs
import pytest

from hotkv_trio._cli._output import spans
from hotkv_trio._sizes import rounded_size, size
from hotkv_trio.llama._architectures import ARCHITECTURES
from hotkv_trio.llama._gguf import MetaValue, encode_header, read_gguf
from hotkv_trio.llama._planning import inspect_model
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf
from tests.cli._shell import UNUSABLE, tiny_shard, unusable

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli._shell import Shell


def test_says_what_the_model_is(shell: Shell, tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf", "gemma3", n_layer=7)
    called = shell("inspect", model)
    assert called.status == 0, called.err
    assert called.fact("architecture") == "gemma3"
    assert called.fact("memory") == "sliding, window of 32 tokens"
    assert called.fact("vocabulary") == "512 tokens, tokenizer llama"
    assert called.fact("may be cut at layer") == "1-6"
    assert called.fact("layers 0:7") == "all"
    assert called.fact("KV per token (f16)") == "1,792 B (1.8 KiB)"
    assert called.fact("file") == size(model.stat().st_size)


def test_says_what_a_range_takes_beside_the_whole(shell: Shell, tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf", "gemma3", n_layer=7)
    called = shell("inspect", model, "--layers", "2:5", "--type-k", "q8_0", "--type-v", "f32")
    report = inspect_model(model, (2, 5), "q8_0", "f32")
    assert called.fact("layers 2:5") == "3 of 7"
    assert called.fact("KV per token (q8_0 and f32)") == size(report.kv_bytes_per_token)
    assert called.fact("of all layers'") == size(report.kv_bytes_per_token // 3 * 7)
    assert called.fact("weights") == size(report.weight_bytes)


def test_says_what_a_recurrent_session_takes(shell: Shell, tmp_path: Path) -> None:
    called = shell("inspect", build_tiny_gguf(tmp_path / "m.gguf", "mamba"))
    assert called.fact("memory") == "recurrent"
    assert called.fact("KV per token (f16)") == "0 B"
    assert called.fact("state per session") == size(inspect_model(tmp_path / "m.gguf").state_bytes)


def test_says_why_a_model_cannot_be_cut(shell: Shell, tmp_path: Path) -> None:
    called = shell("inspect", tiny_shard(tmp_path))
    assert called.status == 0
    assert shell("inspect", tmp_path / "shard.gguf", "--layers", "0:2").out == called.out
    assert called.fact("may be cut at layer") == "nowhere: it is a shard (layers 1:3)"


def test_says_why_an_architecture_cannot_be_cut(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf")
    monkeypatch.delitem(cast("dict[str, object]", ARCHITECTURES), "llama")
    why = "architecture 'llama': no test has shown its shards to be exact"
    assert shell("inspect", model).fact("may be cut at layer") == f"nowhere: {why}"
    refused = shell("slice", model, "--layers", "0:2", "--out", tmp_path / "s.gguf")
    assert refused.is_refusal(f"{why}.  Serve all its layers together, or a model of one of: ", "hotkv-trio inspect")
    assert "None" not in refused.err


def test_says_that_a_single_layer_cannot_be_cut(shell: Shell, tmp_path: Path) -> None:
    called = shell("inspect", build_tiny_gguf(tmp_path / "m.gguf", n_layer=1))
    assert called.fact("may be cut at layer") == "nowhere: a single layer"


def test_json_is_the_whole_report(shell: Shell, tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf")
    document = shell("inspect", model, "--layers", "1:", "--json").document
    report = attrs.asdict(inspect_model(model, (1, 4)))
    assert document == {key: list(value) if isinstance(value, tuple) else value for key, value in report.items()}
    assert document["valid_cuts"] == [1, 2, 3]


def test_what_a_file_says_does_not_steer_the_terminal(shell: Shell, tmp_path: Path) -> None:
    plain, model = build_tiny_gguf(tmp_path / "p.gguf"), tmp_path / "m.gguf"
    file = read_gguf(plain)
    metadata = {**file.metadata, "general.name": MetaValue.guess("\x1b[2Jgone [red]\nweights 0")}
    header = encode_header(metadata, ((t.name, t.shape, t.type) for t in file.tensors.values()))
    model.write_bytes(header + plain.read_bytes()[next(iter(file.tensors.values())).offset :])
    called = shell("inspect", model)
    assert called.fact("name") == "·[2Jgone [red]·weights 0"


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_is_no_whole_model_is_refused(shell: Shell, tmp_path: Path, kind: str) -> None:
    model = unusable(tmp_path, kind)
    assert shell("inspect", model).is_refusal(str(model), "a whole GGUF file")


@pytest.mark.parametrize(
    "options, what",
    [
        (["--layers", "0:3"], "the nearest valid cuts are 2 and 4"),
        (["--layers", "0"], "no range of layers"),
        (["--type-k", "q9"], "iq4_nl, not 'q9'"),
    ],
)
def test_a_bad_question_is_refused(shell: Shell, tmp_path: Path, options: list[str], what: str) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf", "jamba", n_layer=6)
    assert shell("inspect", model, *options).is_refusal(what, "hotkv-trio inspect")


@pytest.mark.parametrize(
    "arguments, next_",
    [
        (["inspect"], "hotkv-trio inspect --help"),
        (["inspect", "m.gguf", "--colour", "red"], "hotkv-trio inspect --help"),
        (["inspekt", "m.gguf"], "hotkv-trio --help"),
        (["doctor", "m.gguf"], "write the name of its option before it, as --model FILE; hotkv-trio doctor --help"),
        (["inspect", ""], "hotkv-trio inspect --help"),
        (["cluster", "up"], "hotkv-trio cluster up --help"),
    ],
)
def test_wrong_usage_says_where_help_is(shell: Shell, arguments: list[str], next_: str) -> None:
    called = shell(*arguments)
    assert called.status == 2
    assert not called.out
    assert called.err.splitlines()[-1] == f"Next: {next_} says what there is."


@pytest.mark.parametrize(
    "command",
    [
        ["inspect"],
        *([name, "--model"] for name in ("doctor", "demo", "bench", "generate")),
        *(
            ["serve", "m.gguf", "--listen", "unix:s", option]
            for option in ("--token-file", "--certificate", "--client-authority")
        ),
        *(["top", "--connect", "unix:s", option] for option in ("--token-file", "--certificate", "--authority")),
    ],
)
def test_an_empty_path_is_not_the_folder_where_one_is(shell: Shell, command: list[str]) -> None:
    called = shell(*command, "")
    assert called.status == 2
    assert "the path is empty" in called.err


def test_numbers_are_drawn_together() -> None:
    assert spans([]) == ""
    assert spans([4]) == "4"
    assert spans([1, 2, 3, 6, 8, 9, 12, 13, 14, 15]) == "1-3, 6, 8, 9, 12-15"


def test_sizes_are_exact_and_rounded() -> None:
    assert size(98_362_432) == "98,362,432 B (93.8 MiB)"
    assert [rounded_size(n) for n in (0, 1023, 1024, 5 << 30, 3 << 41)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
        "6.0 TiB",
    ]
