"""What a GGUF file says of its model: layers, sizes, windows, weights and KV in bytes.  No tensor data is read.

The rules are llama.cpp's own for reading the same keys, so that a figure here is the figure of its log.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, get_args

import attrs
from gguf.constants import GGMLQuantizationType

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama._gguf import read_gguf, row_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

    from hotkv_trio._engine import Memory
    from hotkv_trio.llama._gguf import GgufFile

MAX_LAYERS: Final = 512
"""llama.cpp's own limit."""

BLOCK_TENSOR: Final = re.compile(r"^blk\.(\d+)\.(.+)$", re.DOTALL)
EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
SHARD_KEY: Final = "hotkv.shard"
"""In shard files: first layer, one past the last, layers of the whole model, version."""

_WINDOW_PERIODS: Final[Mapping[str, int]] = {
    "afmoe": 4,
    "cohere2": 4,
    "exaone-moe": 4,
    "gemma-embedding": 6,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "llama4": 4,
    "mellum": 4,
    "muse-glimmer": 4,
    "olmo2": 4,
    "plamo3": 8,
}
"""Layers in a period whose last layer attends to everything, in files that do not give the pattern themselves.

An architecture that is not here, and whose file has no pattern by layer, ignores its window (Phi 3, Mistral).
"""
_RECURRENT: Final = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_HYBRID_BY_HEADS: Final = frozenset({
    "jamba",
    "lfm2",
    "lfm2moe",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "plamo2",
})
"""A layer without key-value heads keeps a recurrent state in their place."""
_HYBRID_EVERYWHERE: Final = frozenset({"falcon-h1"})
"""Each layer has both."""

_T = TypeVar("_T", int, float, str, bool)


@attrs.frozen(kw_only=True)
class ModelFacts:
    """What is known of a model before it is loaded.  Tuples by layer have ``n_layer`` entries."""

    path: Path
    """The file that was asked for; of a split model, its first part or any other."""
    parts: tuple[Path, ...]
    """All files, in order."""
    architecture: str
    name: str
    """What the file calls itself; may be empty."""
    n_layer: int
    n_layer_nextn: int
    """Extra blocks at the end for multi-token prediction, counted in ``n_layer``."""
    n_embd: int
    """Width of a hidden state."""
    n_vocab: int
    n_ctx_train: int
    """Trained context in tokens."""
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    """Heads whose keys and values are cached, by layer; 0: none."""
    head_size_k: tuple[int, ...]
    head_size_v: tuple[int, ...]
    """0 where values are not cached (latent attention)."""
    n_swa: int
    """Width of the sliding window in tokens; 0: none."""
    sliding: tuple[bool, ...]
    """Whether a layer attends within the window only."""
    recurrent: tuple[bool, ...]
    """Whether a layer keeps a recurrent state."""
    state_bytes_per_layer: int
    """Bytes of one sequence's recurrent state in one such layer."""
    memory: Memory
    """By the metadata; the engine probes what is true."""
    tokenizer: str
    """``none``: no vocabulary."""
    n_expert: int
    n_deepstack: int
    """Layers that take the embeddings of earlier ones beside the hidden state (vision)."""
    rope_freq_base: float
    rope_freq_scale: float
    yarn: tuple[float, ...]
    """Extension factor, attention factor, beta fast, beta slow, original context, as stated or by default."""
    layer_bytes: tuple[int, ...]
    """Bytes of the weights, by layer."""
    embedding_bytes: int
    """Bytes of the token embeddings."""
    head_bytes: int
    """Bytes that only the last shard needs: the head (the embeddings' where they serve as one) and its norm."""
    shared_bytes: int
    """Bytes that every shard needs (RoPE factors)."""
    tied: bool
    """Whether the head is the embedding table."""
    file_bytes: int
    """Of all parts."""
    shard: tuple[int, int] | None
    """In a shard file: the layers of the whole model that it holds."""

    def require_model(self) -> None:
        """Refuse a shard's file: served as a whole model, it would be another one.

        Raises:
            InvalidInput: it holds some layers of a model only.
        """
        if self.shard is not None:
            held = f"layers {self.shard[0]}:{self.shard[1]}"
            raise InvalidInput(f"{self.path.name} is a shard ({held}): give the whole model")

    def check_layers(self, layers: tuple[int, int] | None) -> tuple[int, int]:
        """Return the range, or all layers for None.

        Raises:
            InvalidInput: it is empty, turned round, or beyond the model.
        """
        if layers is None:
            return 0, self.n_layer
        first, end = layers
        if not 0 <= first < end <= self.n_layer:
            raise InvalidInput(
                f"layers {first}:{end} are not a range of {self.path.name}, which has layers 0:{self.n_layer}"
            )
        return first, end

    def kv_bytes_per_token(
        self, layers: tuple[int, int] | None = None, type_k: str = "f16", type_v: str = "f16"
    ) -> int:
        """Return the bytes that one token's keys and values take in a range of layers, to the byte.

        Raises:
            InvalidInput: no such range, no such type, or a row is no whole number of the type's blocks.
        """
        first, end = self.check_layers(layers)
        kind_k, kind_v = cache_type(type_k), cache_type(type_v)
        heads = zip(self.n_head_kv[first:end], self.head_size_k[first:end], self.head_size_v[first:end], strict=True)
        return sum(row_bytes(kind_k, n_head * k) + row_bytes(kind_v, n_head * v) for n_head, k, v in heads)

    def state_bytes(self, layers: tuple[int, int] | None = None) -> int:
        """Return the bytes of one sequence's recurrent state in a range of layers: they do not grow with tokens.

        Raises:
            InvalidInput: no such range.
        """
        first, end = self.check_layers(layers)
        return sum(self.recurrent[first:end]) * self.state_bytes_per_layer


KVType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
"""How keys or values are stored."""
CACHE_TYPES: Final[tuple[str, ...]] = get_args(KVType)
"""The same, as names of ggml's types."""


def cache_type(name: str) -> GGMLQuantizationType:
    """Return the ggml type of a name such as ``f16`` or ``q8_0``.

    Raises:
        InvalidInput: it is none of `CACHE_TYPES`.
    """
    if name not in CACHE_TYPES:
        raise InvalidInput(f"keys and values are stored as one of {', '.join(CACHE_TYPES)}, not {name!r:.200}")
    return GGMLQuantizationType[name.upper()]


def read_model_facts(path: str | os.PathLike[str]) -> ModelFacts:
    """Read a model's facts from its GGUF file, or from those of a split one.

    Raises:
        InvalidInput: the file is missing, foreign, truncated or damaged, or is no language model; it says which.
    """
    return model_facts(read_gguf(path))


class _Keys:
    """Reads typed values of one file."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = self.get("general.architecture", str)

    def raw(self, key: str) -> Any:
        value = self.file.metadata.get(key)
        return None if value is None else value.decode()

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """Return one value of a type; ``key`` may begin with a dot for the architecture's own prefix."""
        key = self.architecture + key if key.startswith(".") else key
        value = self.raw(key)
        if value is None:
            if default is None:
                raise InvalidInput(
                    f"{self.file.path}: the key {key} is missing: not a language model that llama.cpp loads"
                )
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InvalidInput(f"{self.file.path}: {key} is {str(value)[:60]!r}, not of type {kind.__name__}")
        return value

    def by_layer(self, key: str, n_layer: int, default: tuple[int, ...] | int | None = None) -> tuple[int, ...]:
        """Return one value a layer, from an array or from a scalar that holds for all."""
        key = self.architecture + key
        value = self.raw(key)
        if value is None:
            if default is None:
                raise InvalidInput(f"{self.file.path}: the key {key} is missing")
            value = default
        values = tuple(value) if isinstance(value, list | tuple) else (value,) * n_layer
        if len(values) != n_layer or not all(isinstance(item, int) and item >= 0 for item in values):
            raise InvalidInput(f"{self.file.path}: {key} must be one integer for each of {n_layer} layers")
        return values


def model_facts(file: GgufFile) -> ModelFacts:
    """Return the facts of a file whose header was read.

    Raises:
        InvalidInput: as `read_model_facts`.
    """
    keys = _Keys(file)
    arch = keys.architecture
    n_layer = keys.get(".block_count", int)
    if not 1 <= n_layer <= MAX_LAYERS:
        raise InvalidInput(f"{file.path}: {arch}.block_count is {n_layer}, not 1 to {MAX_LAYERS}")
    n_embd = keys.get(".embedding_length", int)
    if not 1 <= n_embd < 1 << 31:
        raise InvalidInput(f"{file.path}: {arch}.embedding_length is {n_embd}, not a width")
    n_head = keys.by_layer(".attention.head_count", n_layer, 0)
    n_head_kv = keys.by_layer(".attention.head_count_kv", n_layer, n_head)
    n_swa, sliding = _window(keys, n_layer)
    recurrent = _recurrent(keys, n_layer, n_head_kv)
    full = n_embd // n_head[0] if n_head[0] else keys.get(".attention.key_length", int, 0)
    size_k = keys.get(".attention.key_length", int, full)
    size_v = keys.get(".attention.value_length", int, full)
    size_k_window = keys.get(".attention.key_length_swa", int, size_k)
    size_v_window = keys.get(".attention.value_length_swa", int, size_v)
    if arch + ".attention.key_length_mla" in file.metadata:
        size_v = size_v_window = 0
    shared = keys.get(".attention.shared_kv_layers", int, 0)
    attends = [layer < n_layer - shared and not _only_recurrent(arch, r) for layer, r in enumerate(recurrent)]
    layer_bytes, rest = _weights(file, n_layer)
    n_vocab = _vocabulary(keys)
    tied = HEAD not in rest
    head = sum(size for name, size in rest.items() if name.startswith("output")) + (
        rest.get(EMBEDDING, 0) if tied else 0
    )
    shared_bytes = sum(size for name, size in rest.items() if name.startswith("rope_"))
    freq_scale, yarn = _rope_scaling(keys)
    return ModelFacts(
        path=file.path,
        parts=file.parts,
        architecture=arch,
        name=keys.get("general.name", str, ""),
        n_layer=n_layer,
        n_layer_nextn=keys.get(".nextn_predict_layers", int, 0),
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=keys.get(".context_length", int),
        n_head=n_head,
        n_head_kv=tuple(n if attends[layer] else 0 for layer, n in enumerate(n_head_kv)),
        head_size_k=tuple(size_k_window if window else size_k for window in sliding),
        head_size_v=tuple(size_v_window if window else size_v for window in sliding),
        n_swa=n_swa,
        sliding=sliding,
        recurrent=recurrent,
        state_bytes_per_layer=_state_bytes(keys, n_embd) if any(recurrent) else 0,
        memory=_memory(recurrent, sliding, any(n for n, on in zip(n_head_kv, attends, strict=True) if on)),
        tokenizer=keys.get("tokenizer.ggml.model", str, "none"),
        n_expert=keys.get(".expert_count", int, 0),
        n_deepstack=_deepstack(keys),
        rope_freq_base=keys.get(".rope.freq_base", float, 10000.0),
        rope_freq_scale=freq_scale,
        yarn=yarn,
        layer_bytes=layer_bytes,
        embedding_bytes=rest.get(EMBEDDING, 0),
        head_bytes=head,
        shared_bytes=shared_bytes,
        tied=tied,
        shard=_shard(keys),
        file_bytes=sum(part.stat().st_size for part in file.parts),
    )


def _shard(keys: _Keys) -> tuple[int, int] | None:
    stated = keys.raw(SHARD_KEY)
    if stated is None:
        return None
    if not _are_integers(stated) or len(stated) < 2:
        raise InvalidInput(f"{keys.file.path}: damaged: {SHARD_KEY} is {str(stated)[:60]}")
    return stated[0], stated[1]


def _deepstack(keys: _Keys) -> int:
    mapping = keys.raw(f"{keys.architecture}.deepstack_mapping")
    if mapping is None:
        return 0
    if not _are_integers(mapping):
        raise InvalidInput(f"{keys.file.path}: the deepstack mapping is {str(mapping)[:60]}, not an integer a layer")
    return sum(layer >= 0 for layer in mapping)


def _are_integers(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) for item in value)


def _only_recurrent(arch: str, recurrent: bool) -> bool:  # ruff: ignore[boolean-type-hint-positional-argument]
    return recurrent and arch not in _HYBRID_EVERYWHERE


def _window(keys: _Keys, n_layer: int) -> tuple[int, tuple[bool, ...]]:
    none = (False,) * n_layer
    n_swa = keys.get(".attention.sliding_window", int, 0)
    pattern = keys.raw(f"{keys.architecture}.attention.sliding_window_pattern")
    if n_swa <= 0:
        return 0, none
    if isinstance(pattern, list):
        if len(pattern) != n_layer:
            raise InvalidInput(f"{keys.file.path}: the sliding window's pattern has {len(pattern)} of {n_layer} layers")
        return n_swa, tuple(bool(window) for window in pattern)
    period = _WINDOW_PERIODS.get(keys.architecture)
    if period is None:
        return 0, none
    period = pattern if isinstance(pattern, int) else period
    return n_swa, tuple(period == 0 or layer % period < period - 1 for layer in range(n_layer))


def _recurrent(keys: _Keys, n_layer: int, n_head_kv: tuple[int, ...]) -> tuple[bool, ...]:
    if keys.architecture in _RECURRENT | _HYBRID_EVERYWHERE:
        return (True,) * n_layer
    if keys.architecture in _HYBRID_BY_HEADS:
        return tuple(n == 0 for n in n_head_kv)
    if interval := keys.get(".full_attention_interval", int, 0):
        return tuple((layer + 1) % interval != 0 for layer in range(n_layer))
    return (False,) * n_layer


def _memory(recurrent: tuple[bool, ...], sliding: tuple[bool, ...], attends: bool) -> Memory:  # ruff: ignore[boolean-type-hint-positional-argument]
    if any(recurrent):
        return "hybrid" if attends else "recurrent"
    return "sliding" if any(sliding) else "attention"


def _state_bytes(keys: _Keys, n_embd: int) -> int:
    """Return the float32 bytes of one layer's convolution and state space, one sequence."""
    if window := keys.get(".shortconv.l_cache", int, 0):
        return 4 * n_embd * (window - 1)
    inner, state = keys.get(".ssm.inner_size", int, 0), keys.get(".ssm.state_size", int, 0)
    kernel, groups = keys.get(".ssm.conv_kernel", int, 0), keys.get(".ssm.group_count", int, 0)
    return 4 * (max(0, kernel - 1) * (inner + 2 * groups * state) + inner * state)


def _vocabulary(keys: _Keys) -> int:
    tokens = keys.file.metadata.get("tokenizer.ggml.tokens")
    counted = None if tokens is None else tokens.count
    n_vocab = keys.get(".vocab_size", int, 0) if counted is None else counted
    embedding = keys.file.tensors.get(EMBEDDING)
    if embedding is not None and embedding.n_rows != n_vocab:
        raise InvalidInput(
            f"{keys.file.path}: {n_vocab} tokens in the vocabulary, but {EMBEDDING} has {embedding.n_rows} rows"
        )
    return n_vocab


def _weights(file: GgufFile, n_layer: int) -> tuple[tuple[int, ...], dict[str, int]]:
    by_layer = [0] * n_layer
    rest: dict[str, int] = {}
    for name, tensor in file.tensors.items():
        matched = BLOCK_TENSOR.match(name)
        if matched is None:
            rest[name] = tensor.n_bytes
        elif int(matched[1]) < n_layer:
            by_layer[int(matched[1])] += tensor.n_bytes
        else:
            raise InvalidInput(f"{file.path}: tensor {name} belongs to none of {n_layer} layers")
    for missing in itertools.compress(range(n_layer), (size == 0 for size in by_layer)):
        raise InvalidInput(f"{file.path}: layer {missing} of {n_layer} has no tensors; is a part of the file missing?")
    return tuple(by_layer), rest


def _rope_scaling(keys: _Keys) -> tuple[float, tuple[float, ...]]:
    kind = keys.get(".rope.scaling.type", str, "linear")
    factor = keys.get(".rope.scaling.factor", float, 0.0) or keys.get(".rope.scale_linear", float, 0.0)
    freq_scale = 1.0 if kind == "none" or not factor else 1.0 / factor
    yarn = (
        keys.get(".rope.scaling.yarn_ext_factor", float, 1.0 if kind == "yarn" else 0.0),
        keys.get(".rope.scaling.attn_factor", float, 1.0),
        keys.get(".rope.scaling.yarn_beta_fast", float, 32.0),
        keys.get(".rope.scaling.yarn_beta_slow", float, 1.0),
        float(keys.get(".rope.scaling.original_context_length", int, 0) or keys.get(".context_length", int)),
    )
    return freq_scale, yarn
