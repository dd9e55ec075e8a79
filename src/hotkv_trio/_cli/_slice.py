"""``hotkv-trio slice``: make a shard file by hand."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hotkv_trio._cli._advice import A_WHOLE_MODEL, advising
from hotkv_trio._cli._arguments import AsJson, LayerRange, ModelFile, ShardFile, parse_layers
from hotkv_trio._cli._output import bar, new_console, print_json
from hotkv_trio._sizes import size

if TYPE_CHECKING:
    from hotkv_trio.llama._facts import ModelFacts


def slice_(
    file: ModelFile,
    /,
    *,
    layers: LayerRange,
    out: ShardFile,
    json_: AsJson = False,
) -> None:
    """Write a range of a model's layers as a GGUF file of its own, which the stock llama.cpp loads.

    ``LlamaEngine(path, layers=…)`` does this by itself, from the whole model, and keeps the result; by hand it serves
    to look at a shard, and to load it with other tools. The shard computes, bit for bit, what these layers compute in
    the whole model.
    """
    from hotkv_trio.llama._architectures import check_range
    from hotkv_trio.llama._facts import read_model_facts
    from hotkv_trio.llama._slice import slice_gguf

    with advising(A_WHOLE_MODEL):
        facts = read_model_facts(file)
    with advising(_valid_cuts(facts)):
        owned = parse_layers(layers, facts.n_layer)
        check_range(facts, owned)
    begun = time.monotonic()
    with (
        advising("another path for --out, or free space there"),
        bar(f"layers {owned[0]}:{owned[1]} of {file.name}") as progress,
    ):
        slice_gguf(file, owned, out, progress)
    seconds, n_bytes = time.monotonic() - begun, out.stat().st_size
    if json_:
        print_json({"path": str(out), "layers": owned, "layer_count": facts.n_layer, "file_bytes": n_bytes})
    else:
        said = f"{out}: layers {owned[0]}:{owned[1]} of {facts.n_layer}, {size(n_bytes)}, in {seconds:.1f} s"
        new_console().print(said, markup=False, highlight=False, soft_wrap=True)


def _valid_cuts(facts: ModelFacts) -> str:
    return f"hotkv-trio inspect {facts.path}, which says where the model may be cut"
