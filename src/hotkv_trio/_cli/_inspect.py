"""``hotkv-trio inspect``: what a model is, where it may be cut, and what a range of its layers takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from hotkv_trio._cli._advice import A_WHOLE_MODEL, advising
from hotkv_trio._cli._arguments import AsJson, ModelFile, OptionalLayerRange, TypeK, TypeV, parse_layers
from hotkv_trio._cli._output import print_facts, print_json, spans
from hotkv_trio._sizes import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotkv_trio.llama._planning import ModelReport


def inspect(
    file: ModelFile,
    /,
    *,
    layers: OptionalLayerRange = None,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    json_: AsJson = False,
) -> None:
    """Say what a model is, where it may be cut into shards, and what a range of its layers takes. Loads no weights.

    The architectures whose models may be cut are those that hotkv-trio doctor lists.
    """
    from hotkv_trio.llama._planning import inspect_model

    with advising(A_WHOLE_MODEL):
        whole = inspect_model(file)
    with advising(f"hotkv-trio inspect {file}, which says where the model may be cut; and a type such as f16 or q8_0"):
        owned = None if layers is None else parse_layers(layers, whole.n_layer)
        # All layers are no shard: also of a model that cannot be cut.
        report = inspect_model(file, None if owned == (0, whole.n_layer) else owned, type_k, type_v)
    if json_:
        print_json(attrs.asdict(report))
    else:
        print_facts(_rows(report))


def _rows(report: ModelReport) -> Iterator[tuple[str, object]]:
    yield "name", report.name or "-"
    yield "architecture", report.architecture
    yield "layers", report.n_layer
    if report.shard is not None:
        yield "shard", f"layers {report.shard[0]}:{report.shard[1]} of a model"
    yield "memory", report.memory + (f", window of {report.n_swa:,} tokens" if report.n_swa else "")
    yield "vocabulary", f"{report.n_vocab:,} tokens, tokenizer {report.tokenizer}"
    yield "width", f"{report.n_embd:,} (a hidden state between shards: {report.n_embd * 4:,} B a token)"
    yield "trained context", f"{report.n_ctx_train:,} tokens"
    yield "file", size(report.file_bytes)
    nowhere = f"nowhere: {report.uncut_reason or 'a single layer'}"
    yield "may be cut at layer", spans(report.valid_cuts) or nowhere
    first, end = report.layers
    whole = report.layers == (0, report.n_layer)
    types = report.type_k if report.type_k == report.type_v else f"{report.type_k} and {report.type_v}"
    yield "", ""
    yield f"layers {first}:{end}", "all" if whole else f"{end - first} of {report.n_layer}"
    yield "  weights", size(report.weight_bytes)
    yield f"  KV per token ({types})", size(report.kv_bytes_per_token)
    if not whole:
        yield "  of all layers'", size(report.whole_kv_bytes_per_token)
    if report.state_bytes:
        yield "  state per session", size(report.state_bytes)
