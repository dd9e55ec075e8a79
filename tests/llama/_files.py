"""Model files for tests: split, huge and sparse, and damaged ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gguf.constants import GGMLQuantizationType, GGUFValueType

from hotkv_trio.llama._gguf import MetaValue, encode_header, padded, read_gguf, row_bytes, tensor_chunks

if TYPE_CHECKING:
    from pathlib import Path


def split_gguf(source: Path, folder: Path, n_parts: int) -> list[Path]:
    """Split a model as llama-gguf-split does; return the parts."""
    file = read_gguf(source)
    folder.mkdir(exist_ok=True)
    names = list(file.tensors)
    paths = []
    for number in range(n_parts):
        mine = [
            file.tensors[name] for name in names[number * len(names) // n_parts : (number + 1) * len(names) // n_parts]
        ]
        metadata = dict(file.metadata) if number == 0 else {}
        metadata["split.no"] = MetaValue.of(GGUFValueType.UINT16, number)
        metadata["split.count"] = MetaValue.of(GGUFValueType.UINT16, n_parts)
        metadata["split.tensors.count"] = MetaValue.of(GGUFValueType.INT32, len(names))
        path = folder / f"{source.stem}-{number + 1:05d}-of-{n_parts:05d}.gguf"
        with path.open("wb") as out:
            out.write(encode_header(metadata, ((t.name, t.shape, t.type) for t in mine)))
            for tensor in mine:
                for chunk in tensor_chunks(tensor):
                    out.write(chunk)
                out.write(bytes(padded(tensor.n_bytes, 32) - tensor.n_bytes))
        paths.append(path)
    return paths


def sparse_gguf(path: Path, *, n_layer: int, n_embd: int, n_ff: int, n_vocab: int = 300) -> Path:
    """Write a llama of any size whose weights are holes in the file."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_embd, n_vocab),
        "output_norm.weight": (n_embd,),
        "output.weight": (n_embd, n_vocab),
    }
    for layer in range(n_layer):
        shapes |= {f"blk.{layer}.{name}.weight": (n_embd,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.attn_{name}.weight": (n_embd, n_embd) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{name}.weight": (n_embd, n_ff) for name in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down.weight"] = (n_ff, n_embd)
    numbers = {
        "llama.context_length": 4096,
        "llama.embedding_length": n_embd,
        "llama.block_count": n_layer,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": n_embd // 64,
        "llama.vocab_size": n_vocab,
    }
    metadata = {
        "general.architecture": MetaValue.of(GGUFValueType.STRING, "llama"),
        "tokenizer.ggml.model": MetaValue.of(GGUFValueType.STRING, "none"),
        "llama.attention.layer_norm_rms_epsilon": MetaValue.of(GGUFValueType.FLOAT32, 1e-5),
    } | {key: MetaValue.of(GGUFValueType.UINT32, value) for key, value in numbers.items()}
    kind = GGMLQuantizationType.F32
    header = encode_header(metadata, ((name, shape, kind) for name, shape in shapes.items()))
    sizes = (row_bytes(kind, shape[0]) * math.prod(shape[1:]) for shape in shapes.values())
    with path.open("wb") as out:
        out.write(header)
        out.truncate(len(header) + sum(padded(size, 32) for size in sizes))
    return path
