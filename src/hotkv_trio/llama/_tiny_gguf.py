"""Tiny random models that llama.cpp loads: the material of every test and of the demo, made in milliseconds.

A model is a pure function of its arguments, to the byte: weights come from the raw stream of PCG64 (which NumPy
promises never to change, unlike its distributions), one stream a tensor, and nothing in the file tells the time.
Weights are scaled so that attention is peaked and each layer outweighs the embedding: then logits move with the
whole context, and a mix-up of caches cannot hide.
"""

from __future__ import annotations

import itertools
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import numpy as np
from gguf import quantize
from gguf.constants import GGMLQuantizationType, GGUFValueType

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama._gguf import DEFAULT_ALIGNMENT, MetaValue, encode_header, padded
from hotkv_trio.llama._tiny_plans import PLANS, Sizes

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from hotkv_trio.llama._tiny_plans import Plan

Weights: TypeAlias = Literal["f32", "f16", "q8_0"]
"""How the matrices are stored; norms, biases and routers are always f32."""

_TYPES: Final[Mapping[str, GGMLQuantizationType]] = {
    "f32": GGMLQuantizationType.F32,
    "f16": GGMLQuantizationType.F16,
    "q8_0": GGMLQuantizationType.Q8_0,
}
_FILE_TYPES: Final[Mapping[str, int]] = {"f32": 0, "f16": 1, "q8_0": 7}
_N_BYTE_TOKENS: Final = 259
"""<unk>, <s>, </s> and one token a byte."""

TINY_ARCHITECTURES: Final = tuple(PLANS)
"""What `build_tiny_gguf` can build."""


def build_tiny_gguf(
    path: str | os.PathLike[str],
    arch: str = "llama",
    seed: int = 0,
    *,
    n_layer: int = 4,
    n_embd: int = 128,
    n_head: int = 2,
    n_head_kv: int = 1,
    n_ff: int = 192,
    n_vocab: int = 512,
    n_ctx_train: int = 4096,
    n_expert: int = 4,
    n_expert_used: int = 2,
    sliding_window: int = 32,
    weights: Weights = "f32",
) -> Path:
    """Write a random model of an architecture, the same bytes for the same arguments, and return its path.

    The defaults make heads of 64, at which llama.cpp rotates quantised KV, and a grouped-query ratio of 2.  With
    ``n_vocab`` of 259 or more the model has a SentencePiece vocabulary that can encode any text (one token a byte,
    then characters and syllables, which the head prefers); with less it has none.

    Args:
        path: where to write; an existing file is replaced.
        arch: one of `TINY_ARCHITECTURES`, by its GGUF name.
        seed: of the weights.
        n_layer: blocks.
        n_embd: width of a hidden state; ``n_head`` heads divide it.
        n_head: query heads.
        n_head_kv: key and value heads.
        n_ff: width of the feed-forward block, and of one expert.
        n_vocab: tokens.
        n_ctx_train: trained context in tokens (metadata only).
        n_expert: experts, in architectures that have them.
        n_expert_used: experts a token uses.
        sliding_window: width of the window in tokens, in architectures that have one.
        weights: how matrices are stored; rows that are not a multiple of 32 stay f32 under ``q8_0``.

    Raises:
        InvalidInput: an unknown architecture or storage type, or sizes that do not fit together.
    """
    if arch not in PLANS:
        raise InvalidInput(f"no tiny model of architecture {arch!r}; there are {', '.join(PLANS)}")
    if weights not in get_args(Weights):
        raise InvalidInput(f"weights are {', '.join(get_args(Weights))}, not {weights!r}")
    if min(n_layer, n_head, n_head_kv, n_vocab) < 1 or n_embd % n_head or n_head % n_head_kv:
        raise InvalidInput(
            f"{n_layer} layers, n_vocab {n_vocab}: at least 1; n_embd {n_embd} must be a multiple of n_head {n_head},"
            f" and that of n_head_kv {n_head_kv}"
        )
    sizes = Sizes(
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=n_ff,
        n_vocab=n_vocab,
        n_ctx_train=n_ctx_train,
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        sliding_window=sliding_window,
    )
    plan = PLANS[arch]
    shapes = dict(_shapes(plan, sizes))
    metadata = _metadata(arch, plan, sizes, shapes, weights)
    types = {name: _type(name, shape, weights) for name, shape in shapes.items()}
    target = Path(path)
    with target.open("wb") as file:
        file.write(encode_header(metadata, ((name, shape, types[name]) for name, shape in shapes.items())))
        for name, shape in shapes.items():
            data = _stored(_values(name, shape, seed, plan), types[name])
            file.write(data)
            file.write(bytes(padded(len(data), DEFAULT_ALIGNMENT) - len(data)))
    return target


def _shapes(plan: Plan, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (sizes.n_embd, sizes.n_vocab)
    yield f"{plan.norm}.weight", (sizes.n_embd,)
    if plan.norm_bias:
        yield f"{plan.norm}.bias", (sizes.n_embd,)
    if not plan.tied:
        yield "output.weight", (sizes.n_embd, sizes.n_vocab)
    for layer in range(sizes.n_layer):
        for name, shape in plan.block(sizes, layer).items():
            yield f"blk.{layer}.{name}", shape


def _metadata(
    arch: str, plan: Plan, s: Sizes, shapes: Mapping[str, tuple[int, ...]], weights: str
) -> dict[str, MetaValue]:
    attends = any("attn_q" in name for name in shapes)
    values: dict[str, Any] = {
        "context_length": s.n_ctx_train,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer,
        "feed_forward_length": s.n_ff if any("ffn" in name for name in shapes) else 0,
        "attention.head_count": s.n_head if attends else 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
    }
    if attends:
        values["attention.head_count_kv"] = s.n_head_kv
    if any("_exps" in name for name in shapes):
        values |= {"expert_count": s.n_expert, "expert_used_count": s.n_expert_used}
    values |= plan.metadata(s)
    metadata = {
        "general.architecture": MetaValue.of(GGUFValueType.STRING, arch),
        "general.name": MetaValue.of(GGUFValueType.STRING, "tiny"),
        "general.file_type": MetaValue.of(GGUFValueType.UINT32, _FILE_TYPES[weights]),
        "general.quantization_version": MetaValue.of(GGUFValueType.UINT32, 2),
    }
    metadata |= {f"{arch}.{key}": MetaValue.guess(value) for key, value in values.items()}
    return metadata | _vocabulary(arch, s.n_vocab)


def _vocabulary(arch: str, n_vocab: int) -> dict[str, MetaValue]:
    if n_vocab < _N_BYTE_TOKENS:
        return {
            "tokenizer.ggml.model": MetaValue.of(GGUFValueType.STRING, "none"),
            f"{arch}.vocab_size": MetaValue.of(GGUFValueType.UINT32, n_vocab),
        }
    pieces = list(itertools.islice(_pieces(), n_vocab - _N_BYTE_TOKENS))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    normal, unknown, control, byte_token = 1, 2, 3, 6
    types = [unknown, control, control, *[byte_token] * 256, *[normal] * len(pieces)]
    scores = [0.0] * _N_BYTE_TOKENS + [-float(rank) for rank in range(len(pieces))]
    return {
        "tokenizer.ggml.model": MetaValue.of(GGUFValueType.STRING, "llama"),
        "tokenizer.ggml.tokens": MetaValue.of(GGUFValueType.STRING, tokens),
        "tokenizer.ggml.scores": MetaValue.of(GGUFValueType.FLOAT32, scores),
        "tokenizer.ggml.token_type": MetaValue.of(GGUFValueType.INT32, types),
        "tokenizer.ggml.bos_token_id": MetaValue.of(GGUFValueType.UINT32, 1),
        "tokenizer.ggml.eos_token_id": MetaValue.of(GGUFValueType.UINT32, 2),
        "tokenizer.ggml.unknown_token_id": MetaValue.of(GGUFValueType.UINT32, 0),
    }


def _pieces() -> Iterator[str]:
    """Yield distinct pieces of text without end: characters, syllables with and without a space, then the rest."""
    yield "\u2581"
    yield from (chr(code) for code in range(33, 127))
    syllables = [consonant + vowel for vowel in "aeiou" for consonant in "bcdfghjklmnprstvwz"]
    for syllable in syllables:
        yield "\u2581" + syllable
        yield syllable
    for first, second in itertools.product(syllables, syllables):
        yield first + second
    for number in itertools.count():
        yield f"x{number}"


def _type(name: str, shape: tuple[int, ...], weights: str) -> GGMLQuantizationType:
    plain = len(shape) < 2 or name.endswith((
        "_norm.weight",
        "gate_inp.weight",
        "conv1d.weight",
        "conv.weight",
        "ssm_a",
        "ssm_d",
        "bias",
    ))
    if plain or (weights == "q8_0" and shape[0] % 32):
        return GGMLQuantizationType.F32
    return _TYPES[weights]


def _stored(values: npt.NDArray[np.float32], kind: GGMLQuantizationType) -> bytes:
    if kind == GGMLQuantizationType.F32:
        return values.tobytes()
    if kind == GGMLQuantizationType.F16:
        return values.astype(np.float16).tobytes()
    return bytes(quantize(values, kind).data)


def _values(name: str, shape: tuple[int, ...], seed: int, plan: Plan) -> npt.NDArray[np.float32]:
    """Return the weights of one tensor, float32, shaped in NumPy's order (the row length last)."""
    uniform = _uniform(name, shape, seed)
    leaf = name.rpartition("blk.")[2].partition(".")[2] if name.startswith("blk.") else name
    if leaf == "ssm_a":
        return (-np.arange(1, shape[0] + 1, dtype=np.float32) + np.float32(0.25) * uniform).astype(np.float32)
    if leaf == "ssm_dt.bias":
        return uniform - np.float32(2)
    if leaf == "ssm_d" or ("norm" in leaf and not leaf.endswith("bias")):
        return np.float32(plan.norm_gains.get(leaf, 1)) * (np.float32(1) + np.float32(0.25) * uniform)
    if leaf.endswith("bias"):
        return np.float32(0.25) * uniform
    values = np.float32(_gain(leaf, plan) * math.sqrt(3 / shape[0])) * uniform
    if leaf == "output.weight" and len(values) > _N_BYTE_TOKENS:
        values[:_N_BYTE_TOKENS] *= np.float32(0.25)
    return values


def _gain(leaf: str, plan: Plan) -> float:
    """Return the standard deviation of a product with a vector whose elements have one of 1."""
    if leaf.startswith("token_embd"):
        return plan.embedding_gain
    if leaf.startswith("output."):
        return 4.0
    if leaf.startswith(("ffn", "attn_output", "ssm_out")):
        return 2.0
    return 1.2 if leaf.startswith("attn") else 1.0


def _uniform(name: str, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float32]:
    """Return numbers uniform in [-1, 1), float32, from the tensor's own stream."""
    count = math.prod(shape)
    stream = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    words = stream.random_raw((count + 1) // 2).astype("<u8").view("<u4")[:count]
    signed = (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return signed.reshape(shape[::-1])
