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

import attrs
import numpy as np
from gguf import quantize
from gguf.constants import GGMLQuantizationType, GGUFValueType

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama._gguf import DEFAULT_ALIGNMENT, MetaValue, encode_header, padded

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

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


@attrs.frozen(kw_only=True)
class _Sizes:
    """The sizes that a model is built from."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_size: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    n_expert: int
    n_expert_used: int
    sliding_window: int

    @property
    def n_q(self) -> int:
        """Width of all heads' queries."""
        return self.n_head * self.head_size

    @property
    def n_kv(self) -> int:
        """Width of all heads' keys, and of their values."""
        return self.n_head_kv * self.head_size


_Shapes: TypeAlias = "dict[str, tuple[int, ...]]"
_Metadata: TypeAlias = "Callable[[_Sizes], dict[str, Any]]"


@attrs.frozen(kw_only=True)
class _Plan:
    """How an architecture's blocks and head are made."""

    block: Callable[[_Sizes, int], _Shapes]
    """Tensor names (without ``blk.N.``) and shapes of one block."""
    metadata: _Metadata = lambda _: {}
    """Metadata beyond the common, without the architecture's prefix."""
    tied: bool = False
    """Whether the head is the embedding table."""
    head: Callable[[_Sizes], _Shapes] = lambda sizes: {"output_norm.weight": (sizes.n_embd,)}
    """Tensors after the last block, without ``output.weight``."""
    embedding_gain: float = 4.0
    """Size of an embedding, as a vector."""
    norm_gains: Mapping[str, float] = {"post_ffw_norm.weight": 3.0}
    """Mean weight of a norm, where it is not 1."""


def _dense(
    *,
    qkv: Literal["split", "fused"] = "split",
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: Literal["head", "full"] | None = None,
    pre_norm: bool = True,
    post_norm: bool = False,
    norm_bias: bool = False,
    ffn: Literal["gated", "fused", "plain", "experts"] = "gated",
    ffn_bias: bool = False,
    ffn_norm: bool = True,
) -> Callable[[_Sizes, int], _Shapes]:
    """Return the shapes of an attention block, followed by a feed-forward block."""

    def block(s: _Sizes, _: int) -> _Shapes:
        shapes: _Shapes = {}
        if pre_norm:
            shapes["attn_norm.weight"] = (s.n_embd,)
        shapes |= _attention(s, qkv=qkv, bias=qkv_bias)
        shapes["attn_output.weight"] = (s.n_q, s.n_embd)
        if out_bias:
            shapes["attn_output.bias"] = (s.n_embd,)
        if qk_norm:
            shapes["attn_q_norm.weight"] = (s.head_size if qk_norm == "head" else s.n_q,)
            shapes["attn_k_norm.weight"] = (s.head_size if qk_norm == "head" else s.n_kv,)
        if post_norm:
            shapes["post_attention_norm.weight"] = (s.n_embd,)
        if pre_norm and ffn_norm:
            shapes["ffn_norm.weight"] = (s.n_embd,)
        shapes |= _feed_forward(s, kind=ffn, bias=ffn_bias)
        if post_norm:
            shapes["post_ffw_norm.weight"] = (s.n_embd,)
        if norm_bias:
            norms = ("attn_norm", "ffn_norm")
            shapes |= {f"{name}.bias": (s.n_embd,) for name in norms if f"{name}.weight" in shapes}
        return shapes

    return block


def _attention(s: _Sizes, *, qkv: str = "split", bias: bool = False) -> _Shapes:
    widths = {"attn_q": s.n_q, "attn_k": s.n_kv, "attn_v": s.n_kv}
    if qkv == "fused":
        widths = {"attn_qkv": s.n_q + 2 * s.n_kv}
    shapes: _Shapes = {f"{name}.weight": (s.n_embd, width) for name, width in widths.items()}
    return shapes | ({f"{name}.bias": (width,) for name, width in widths.items()} if bias else {})


def _feed_forward(s: _Sizes, *, kind: str = "gated", bias: bool = False) -> _Shapes:
    if kind == "experts":
        return {
            "ffn_gate_inp.weight": (s.n_embd, s.n_expert),
            "ffn_gate_exps.weight": (s.n_embd, s.n_ff, s.n_expert),
            "ffn_down_exps.weight": (s.n_ff, s.n_embd, s.n_expert),
            "ffn_up_exps.weight": (s.n_embd, s.n_ff, s.n_expert),
        }
    shapes: _Shapes = {"ffn_gate.weight": (s.n_embd, s.n_ff)} if kind == "gated" else {}
    shapes["ffn_down.weight"] = (s.n_ff, s.n_embd)
    shapes["ffn_up.weight"] = (s.n_embd, 2 * s.n_ff if kind == "fused" else s.n_ff)
    if bias:
        shapes |= {name.replace("weight", "bias"): shape[1:] for name, shape in shapes.items()}
    return shapes


_D_CONV: Final = 4
_D_STATE: Final = 16


def _dt_rank(s: _Sizes) -> int:
    return max(1, s.n_embd // 16)


def _mamba(s: _Sizes, *, normed: bool = False) -> _Shapes:
    d_inner, dt_rank = 2 * s.n_embd, _dt_rank(s)
    shapes: _Shapes = {
        "attn_norm.weight": (s.n_embd,),
        "ssm_in.weight": (s.n_embd, 2 * d_inner),
        "ssm_conv1d.weight": (_D_CONV, d_inner),
        "ssm_conv1d.bias": (d_inner,),
        "ssm_x.weight": (d_inner, dt_rank + 2 * _D_STATE),
        "ssm_dt.weight": (dt_rank, d_inner),
        "ssm_dt.bias": (d_inner,),
        "ssm_a": (_D_STATE, d_inner),
        "ssm_d": (d_inner,),
        "ssm_out.weight": (d_inner, s.n_embd),
    }
    if normed:
        shapes |= {"ssm_dt_norm.weight": (dt_rank,), "ssm_b_norm.weight": (_D_STATE,), "ssm_c_norm.weight": (_D_STATE,)}
    return shapes


def _mamba_sizes(s: _Sizes) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": _D_CONV,
        "ssm.inner_size": 2 * s.n_embd,
        "ssm.state_size": _D_STATE,
        "ssm.time_step_rank": _dt_rank(s),
    }


def _attends(layer: int) -> bool:
    """Whether a layer of a hybrid attends: every second one, from the second on."""
    return layer % 2 == 1


def _hybrid_heads(s: _Sizes) -> list[int]:
    return [s.n_head_kv if _attends(layer) else 0 for layer in range(s.n_layer)]


def _jamba(s: _Sizes, layer: int) -> _Shapes:
    if not _attends(layer):
        mixer = _mamba(s, normed=True)
    else:
        mixer = {"attn_norm.weight": (s.n_embd,)} | _attention(s) | {"attn_output.weight": (s.n_q, s.n_embd)}
    return mixer | {"ffn_norm.weight": (s.n_embd,)} | _feed_forward(s)


def _head_lengths(s: _Sizes) -> dict[str, Any]:
    return {"attention.key_length": s.head_size, "attention.value_length": s.head_size}


_PLANS: Final[Mapping[str, _Plan]] = {
    "llama": _Plan(block=_dense(), metadata=lambda s: {"rope.dimension_count": s.head_size} | _head_lengths(s)),
    "qwen2": _Plan(block=_dense(qkv_bias=True)),
    "qwen3": _Plan(block=_dense(qk_norm="head"), metadata=_head_lengths),
    "qwen3moe": _Plan(
        block=_dense(qk_norm="head", ffn="experts"),
        metadata=lambda s: _head_lengths(s) | {"expert_feed_forward_length": s.n_ff},
    ),
    "gemma3": _Plan(
        block=_dense(qk_norm="head", post_norm=True),
        metadata=lambda s: (
            _head_lengths(s) | {"attention.sliding_window": s.sliding_window, "rope.freq_base": 1_000_000.0}
        ),
        tied=True,
        embedding_gain=0.5,
        norm_gains={"post_ffw_norm.weight": 3.0, "output_norm.weight": 6.0},
    ),
    "phi3": _Plan(block=_dense(qkv="fused", ffn="fused"), metadata=lambda s: {"rope.dimension_count": s.head_size}),
    "granite": _Plan(
        block=_dense(),
        metadata=lambda _: {
            "logit_scale": 2.0,
            "residual_scale": 0.75,
            "embedding_scale": 3.0,
            "attention.scale": 0.0625,
        },
        tied=True,
        embedding_gain=1.0,
        norm_gains={"output_norm.weight": 8.0},
    ),
    "olmo2": _Plan(block=_dense(qk_norm="full", pre_norm=False, post_norm=True)),
    "mamba": _Plan(block=lambda s, _: _mamba(s), metadata=_mamba_sizes),
    "jamba": _Plan(block=_jamba, metadata=lambda s: _mamba_sizes(s) | {"attention.head_count_kv": _hybrid_heads(s)}),
}

TINY_ARCHITECTURES: Final = tuple(_PLANS)
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
    if arch not in _PLANS:
        raise InvalidInput(f"no tiny model of architecture {arch!r}; there are {', '.join(_PLANS)}")
    if weights not in get_args(Weights):
        raise InvalidInput(f"weights are {', '.join(get_args(Weights))}, not {weights!r}")
    if min(n_layer, n_head, n_head_kv, n_vocab) < 1 or n_embd % n_head or n_head % n_head_kv:
        raise InvalidInput(
            f"{n_layer} layers, n_vocab {n_vocab}: at least 1; n_embd {n_embd} must be a multiple of n_head {n_head},"
            f" and that of n_head_kv {n_head_kv}"
        )
    sizes = _Sizes(
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_size=n_embd // n_head,
        n_ff=n_ff,
        n_vocab=n_vocab,
        n_ctx_train=n_ctx_train,
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        sliding_window=sliding_window,
    )
    plan = _PLANS[arch]
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


def _shapes(plan: _Plan, sizes: _Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (sizes.n_embd, sizes.n_vocab)
    yield from plan.head(sizes).items()
    if not plan.tied:
        yield "output.weight", (sizes.n_embd, sizes.n_vocab)
    for layer in range(sizes.n_layer):
        for name, shape in plan.block(sizes, layer).items():
            yield f"blk.{layer}.{name}", shape


def _metadata(
    arch: str, plan: _Plan, s: _Sizes, shapes: Mapping[str, tuple[int, ...]], weights: str
) -> dict[str, MetaValue]:
    attends = any("attn_q" in name for name in shapes)
    values: dict[str, Any] = {
        "context_length": s.n_ctx_train,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer,
        "feed_forward_length": s.n_ff if any("ffn" in name for name in shapes) else 0,
        "attention.head_count": s.n_head if attends else 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
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
    plain = len(shape) < 2 or name.endswith(("_norm.weight", "ffn_gate_inp.weight", "conv1d.weight", "ssm_a"))
    if plain or (weights == "q8_0" and shape[0] % 32):
        return GGMLQuantizationType.F32
    return _TYPES[weights]


def _stored(values: npt.NDArray[np.float32], kind: GGMLQuantizationType) -> bytes:
    if kind == GGMLQuantizationType.F32:
        return values.tobytes()
    if kind == GGMLQuantizationType.F16:
        return values.astype(np.float16).tobytes()
    return bytes(quantize(values, kind).data)


def _values(name: str, shape: tuple[int, ...], seed: int, plan: _Plan) -> npt.NDArray[np.float32]:
    """Return the weights of one tensor, float32, shaped in NumPy's order (the row length last)."""
    uniform = _uniform(name, shape, seed)
    leaf = name.rpartition("blk.")[2].partition(".")[2] if name.startswith("blk.") else name
    if leaf == "ssm_a":
        return (-np.arange(1, shape[0] + 1, dtype=np.float32) + np.float32(0.25) * uniform).astype(np.float32)
    if leaf == "ssm_dt.bias":
        return uniform - np.float32(2)
    if leaf == "ssm_d" or ("norm" in leaf and leaf.endswith("weight")):
        return np.float32(plan.norm_gains.get(leaf, 1)) * (np.float32(1) + np.float32(0.25) * uniform)
    if leaf.endswith("bias"):
        return np.float32(0.25) * uniform
    values = np.float32(_gain(leaf, plan) * math.sqrt(3 / shape[0])) * uniform
    if leaf == "output.weight" and len(values) > _N_BYTE_TOKENS:
        values[:_N_BYTE_TOKENS] *= np.float32(0.25)
    return values


def _gain(leaf: str, plan: _Plan) -> float:
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
