"""``hotkv-trio recipe``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest

from hotkv_trio.llama import LlamaEngine
from hotkv_trio.llama._digest import model_digest
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf
from tests.cli._shell import UNUSABLE, tiny_shard, unusable

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli._shell import Shell


def test_prints_every_field_and_the_digest(shell: Shell, tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf")
    called = shell("recipe", model)
    assert called.status == 0, called.err
    engine = LlamaEngine(model)
    try:
        recipe = engine.open().recipe
    finally:
        engine.close()
    for field in attrs.fields(type(recipe)):
        assert called.fact(f"{field.name} ")
    assert called.fact("digest") == recipe.digest()
    assert called.fact("model_digest") == model_digest(model)
    assert called.fact("layers") == "0, 4"
    assert called.fact("lora") == "none"
    assert called.fact("flash_attention") == "yes"
    assert called.fact("kv_rotation") == "no"


def test_is_the_recipe_of_a_runtime_with_these_options(shell: Shell, tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf")
    options = ["--layers", "1:3", "--context", 500, "--type-k", "q8_0", "--type-v", "q8_0"]
    document = shell("recipe", model, *options, "--json").document
    engine = LlamaEngine(model, layers=(1, 3), n_slots=3, n_ctx=500, type_k="q8_0", type_v="q8_0")
    try:
        recipe = engine.open().recipe
    finally:
        engine.close()
    assert document["digest"] == recipe.digest()
    assert document["recipe"]["layers"] == [1, 3]
    assert document["recipe"]["n_ctx_seq"] == 512
    assert set(document["recipe"]) == set(attrs.asdict(recipe))


def test_what_takes_long_is_said_and_done_once(shell: Shell, tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf")
    first = shell("recipe", model, "--layers", "0:2")
    assert first.err == "digest of m.gguf\nlayers 0:2 of m.gguf\n"
    second = shell("recipe", model, "--layers", "0:2")
    assert (second.out, second.err) == (first.out, "")


def test_a_shard_file_is_refused_as_a_model(shell: Shell, tmp_path: Path) -> None:
    called = shell("recipe", tiny_shard(tmp_path))
    assert called.is_refusal("is a shard (layers 1:3)", "the file that it was cut from"), called


@pytest.mark.parametrize(
    "options, what, advice",
    [
        (["--layers", "0:9"], "not a range of m.gguf", "hotkv-trio inspect"),
        (["--layers", "x"], "no range of layers", "hotkv-trio inspect"),
        (["--type-k", "q6_k"], "type_k='q6_k': KV is stored as f32, f16", "types such as f16 or q8_0"),
    ],
)
def test_what_cannot_be_is_refused(shell: Shell, tmp_path: Path, options: list[str], what: str, advice: str) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf")
    shell("recipe", model)
    called = shell("recipe", model, *options)
    assert called.is_refusal(what, advice), called


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_is_no_whole_model_is_refused(shell: Shell, tmp_path: Path, kind: str) -> None:
    model = unusable(tmp_path, kind)
    assert shell("recipe", model).is_refusal(str(model), "a whole GGUF file")
