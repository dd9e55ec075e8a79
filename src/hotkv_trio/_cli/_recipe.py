"""``hotkv-trio recipe``: everything that must agree for cached KV to mean the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import attrs
from cyclopts import Parameter

from hotkv_trio._cli._advice import A_WHOLE_MODEL, WHAT_IT_WAS_CUT_FROM, advising
from hotkv_trio._cli._arguments import SOME, AsJson, ModelFile, OptionalLayerRange, TypeK, TypeV, parse_layers
from hotkv_trio._cli._output import bar, print_facts, print_json

if TYPE_CHECKING:
    from pathlib import Path

    from hotkv_trio._recipe import CacheRecipe
    from hotkv_trio.llama import KVType


def recipe(
    file: ModelFile,
    /,
    *,
    layers: OptionalLayerRange = None,
    context: Annotated[int, Parameter(validator=SOME, help="Tokens of one session; part of the recipe.")] = 4096,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    json_: AsJson = False,
) -> None:
    """Open a model with room for one session, and print its cache recipe and the recipe's digest.

    A runtime refuses clients whose recipe differs in any field. On a large file the model digest takes a second a
    gigabyte, once: it is kept beside the file.
    """
    made = _opened_recipe(file, layers, context, (cast("KVType", type_k), cast("KVType", type_v)))
    fields = attrs.asdict(made)
    if json_:
        print_json({"digest": made.digest(), "recipe": fields})
    else:
        rows = [(name, _said(value)) for name, value in fields.items()]
        print_facts([*rows, ("", ""), ("digest", made.digest())])


def _opened_recipe(file: Path, layers: str | None, context: int, types: tuple[KVType, KVType]) -> CacheRecipe:
    from hotkv_trio.llama import LlamaEngine
    from hotkv_trio.llama._architectures import check_range
    from hotkv_trio.llama._digest import model_digest
    from hotkv_trio.llama._facts import read_model_facts
    from hotkv_trio.llama._slice import cached_slice

    with advising(A_WHOLE_MODEL):
        facts = read_model_facts(file)
    with advising(WHAT_IT_WAS_CUT_FROM):
        facts.require_model()
    with advising(f"hotkv-trio inspect {file}, which says where the model may be cut"):
        owned = facts.check_layers(None if layers is None else parse_layers(layers, facts.n_layer))
        whole = owned == (0, facts.n_layer)
        if not whole:
            check_range(facts, owned)
    # What the engine would do without a word is done first, with a bar: it finds both made then.
    with advising(A_WHOLE_MODEL), bar(f"digest of {file.name}") as progress:
        model_digest(file, progress)
    if not whole:
        with (
            advising("free space in the user's cache directory, or another one in XDG_CACHE_HOME"),
            bar(f"layers {owned[0]}:{owned[1]} of {file.name}") as progress,
        ):
            cached_slice(file, owned, progress=progress)
    with advising("a smaller --context, which takes less memory, types such as f16 or q8_0, or another model"):
        engine = LlamaEngine(
            file, layers=None if whole else owned, n_slots=1, n_ctx=context, type_k=types[0], type_v=types[1]
        )
        try:
            return engine.open().recipe
        finally:
            engine.close()


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)
