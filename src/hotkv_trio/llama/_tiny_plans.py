"""What tiny models are made of, by architecture: the tensors of a block, and what the metadata must say.

Read off llama.cpp's own loaders.  Names, shapes and keys only; `_tiny_gguf` fills them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Shapes: TypeAlias = "dict[str, tuple[int, ...]]"
"""Tensor names and shapes, ggml's order: the row length first."""
Values: TypeAlias = "dict[str, Any]"
"""Metadata, without the architecture's prefix."""


@attrs.frozen(kw_only=True)
class Sizes:
    """The sizes that a model is built from."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    n_expert: int
    n_expert_used: int
    sliding_window: int

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.n_embd // self.n_head

    @property
    def n_q(self) -> int:
        """Width of all heads' queries."""
        return self.n_head * self.head_size

    @property
    def n_kv(self) -> int:
        """Width of all heads' keys, and of their values."""
        return self.n_head_kv * self.head_size


@attrs.frozen(kw_only=True)
class Plan:
    """How an architecture's blocks and head are made."""

    block: Callable[[Sizes, int], Shapes]
    """Tensors of one block, without ``blk.N.``."""
    metadata: Callable[[Sizes], Values] = lambda _: {}
    """Values beyond the common ones."""
    tied: bool = False
    """Whether the head is the embedding table."""
    norm: str = "output_norm"
    """The norm before the head."""
    norm_bias: bool = False
    """Whether that norm has a bias."""
    embedding_gain: float = 4.0
    """Size of an embedding, as a vector."""
    norm_gains: Mapping[str, float] = {"post_ffw_norm.weight": 3.0}
    """Mean weight of a norm, where it is not 1."""


_PRE: Final = ("attn_norm", "ffn_norm")
_POST: Final = ("post_attention_norm", "post_ffw_norm")


def _dense(
    *,
    norms: tuple[str, ...] = _PRE,
    norm_bias: bool = False,
    qkv: Literal["split", "fused"] = "split",
    qkv_bias: bool = False,
    qk_norm: Literal["head", "full"] | None = None,
    out_bias: bool = False,
    ffn: Literal["gated", "fused", "plain", "experts", "shared experts"] = "gated",
    ffn_bias: bool = False,
    more: Callable[[Sizes], Shapes] = lambda _: {},
) -> Callable[[Sizes, int], Shapes]:
    """Return the shapes of an attention block followed by a feed-forward block."""

    def block(s: Sizes, _: int) -> Shapes:
        shapes: Shapes = {f"{name}.weight": (s.n_embd,) for name in norms}
        if norm_bias:
            shapes |= {f"{name}.bias": (s.n_embd,) for name in norms}
        shapes |= _attention(s, qkv=qkv, bias=qkv_bias, qk_norm=qk_norm)
        if out_bias:
            shapes["attn_output.bias"] = (s.n_embd,)
        return shapes | _feed_forward(s, kind=ffn, bias=ffn_bias) | more(s)

    return block


def _attention(s: Sizes, *, qkv: str = "split", bias: bool = False, qk_norm: str | None = None) -> Shapes:
    widths = {"attn_q": s.n_q, "attn_k": s.n_kv, "attn_v": s.n_kv}
    if qkv == "fused":
        widths = {"attn_qkv": s.n_q + 2 * s.n_kv}
    shapes: Shapes = {f"{name}.weight": (s.n_embd, width) for name, width in widths.items()}
    if bias:
        shapes |= {f"{name}.bias": (width,) for name, width in widths.items()}
    if qk_norm:
        shapes["attn_q_norm.weight"] = (s.head_size if qk_norm == "head" else s.n_q,)
        shapes["attn_k_norm.weight"] = (s.head_size if qk_norm == "head" else s.n_kv,)
    return shapes | {"attn_output.weight": (s.n_q, s.n_embd)}


def _feed_forward(s: Sizes, *, kind: str = "gated", bias: bool = False) -> Shapes:
    if kind.endswith("experts"):
        shapes: Shapes = {
            "ffn_gate_inp.weight": (s.n_embd, s.n_expert),
            "ffn_gate_exps.weight": (s.n_embd, s.n_ff, s.n_expert),
            "ffn_down_exps.weight": (s.n_ff, s.n_embd, s.n_expert),
            "ffn_up_exps.weight": (s.n_embd, s.n_ff, s.n_expert),
        }
    else:
        shapes = {"ffn_gate.weight": (s.n_embd, s.n_ff)} if kind == "gated" else {}
        shapes["ffn_down.weight"] = (s.n_ff, s.n_embd)
        shapes["ffn_up.weight"] = (s.n_embd, 2 * s.n_ff if kind == "fused" else s.n_ff)
    if bias:
        shapes |= {name.replace("weight", "bias"): shape[1:] for name, shape in shapes.items()}
    if kind == "shared experts":
        shapes |= {
            "ffn_gate_inp_shexp.weight": (s.n_embd,),
            "ffn_gate_shexp.weight": (s.n_embd, s.n_ff),
            "ffn_down_shexp.weight": (s.n_ff, s.n_embd),
            "ffn_up_shexp.weight": (s.n_embd, s.n_ff),
        }
    return shapes


_D_CONV: Final = 4
_D_STATE: Final = 16
_SSM_HEAD: Final = 32
"""Width of a Mamba 2 head."""


def _dt_rank(s: Sizes) -> int:
    return max(1, s.n_embd // 16)


def _mamba(s: Sizes, *, normed: bool = False) -> Shapes:
    d_inner, dt_rank = 2 * s.n_embd, _dt_rank(s)
    shapes: Shapes = {
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


def _mamba_values(s: Sizes) -> Values:
    return _state_values(s) | {"ssm.time_step_rank": _dt_rank(s)}


def _mamba2(s: Sizes) -> Shapes:
    d_inner = 2 * s.n_embd
    n_head, conv = d_inner // _SSM_HEAD, d_inner + 2 * _D_STATE
    return {
        "attn_norm.weight": (s.n_embd,),
        "ssm_in.weight": (s.n_embd, d_inner + conv + n_head),
        "ssm_conv1d.weight": (_D_CONV, conv),
        "ssm_conv1d.bias": (conv,),
        "ssm_dt.bias": (n_head,),
        "ssm_a": (1, n_head),
        "ssm_d": (1, n_head),
        "ssm_norm.weight": (d_inner, 1),
        "ssm_out.weight": (d_inner, s.n_embd),
    }


def _mamba2_values(s: Sizes) -> Values:
    return _state_values(s) | {"ssm.time_step_rank": 2 * s.n_embd // _SSM_HEAD, "ssm.group_count": 1}


def _state_values(s: Sizes) -> Values:
    return {"ssm.conv_kernel": _D_CONV, "ssm.inner_size": 2 * s.n_embd, "ssm.state_size": _D_STATE}


def _attends(layer: int) -> bool:
    """Whether a layer of a hybrid attends: every second one, from the second on."""
    return layer % 2 == 1


def _heads_by_layer(s: Sizes) -> Values:
    return {"attention.head_count_kv": [s.n_head_kv if _attends(layer) else 0 for layer in range(s.n_layer)]}


def _hybrid(
    keeps: Callable[[Sizes], Shapes], *, qk_norm: Literal["head"] | None = None
) -> Callable[[Sizes, int], Shapes]:
    """Return the shapes of blocks of which every second attends, and the others keep a state."""

    def block(s: Sizes, layer: int) -> Shapes:
        mixer = keeps(s) if not _attends(layer) else {"attn_norm.weight": (s.n_embd,)} | _attention(s, qk_norm=qk_norm)
        return mixer | {"ffn_norm.weight": (s.n_embd,)} | _feed_forward(s)

    return block


def _falcon_h1(s: Sizes, _: int) -> Shapes:
    return _mamba2(s) | _attention(s) | {"ffn_norm": (s.n_embd,)} | _feed_forward(s)


def _short_convolution(s: Sizes) -> Shapes:
    return {
        "attn_norm.weight": (s.n_embd,),
        "shortconv.conv.weight": (3, s.n_embd),
        "shortconv.in_proj.weight": (s.n_embd, 3 * s.n_embd),
        "shortconv.out_proj.weight": (s.n_embd, s.n_embd),
    }


def _head_lengths(s: Sizes) -> Values:
    return {"attention.key_length": s.head_size, "attention.value_length": s.head_size}


def _rotary(s: Sizes) -> Values:
    return {"rope.dimension_count": s.head_size}


def _windowed(s: Sizes) -> Values:
    return {"attention.sliding_window": s.sliding_window}


def _expert_width(s: Sizes) -> Values:
    return {"expert_feed_forward_length": s.n_ff}


_GRANITE_SCALES: Final = {
    "logit_scale": 2.0,
    "residual_scale": 0.75,
    "embedding_scale": 3.0,
    "attention.scale": 0.0625,
}
_SCALED: Final[Mapping[str, Any]] = {
    "tied": True,
    "embedding_gain": 1.0,
    "norm_gains": {"output_norm.weight": 8.0},
}
"""What keeps the logits of a model with scaled embeddings apart."""

PLANS: Final[Mapping[str, Plan]] = {
    "llama": Plan(block=_dense(), metadata=lambda s: _rotary(s) | _head_lengths(s)),
    "mistral3": Plan(
        block=_dense(),
        metadata=lambda s: _rotary(s) | _head_lengths(s) | {"attention.temperature_scale": 0.1},
    ),
    "qwen2": Plan(block=_dense(qkv_bias=True)),
    "qwen2moe": Plan(block=_dense(qkv_bias=True, ffn="shared experts"), metadata=_expert_width),
    "qwen3": Plan(block=_dense(qk_norm="head"), metadata=_head_lengths),
    "qwen3moe": Plan(
        block=_dense(qk_norm="head", ffn="experts"), metadata=lambda s: _head_lengths(s) | _expert_width(s)
    ),
    "gemma3": Plan(
        block=_dense(qk_norm="head", norms=_PRE + _POST),
        metadata=lambda s: _head_lengths(s) | _windowed(s) | {"rope.freq_base": 1_000_000.0},
        tied=True,
        embedding_gain=0.5,
        norm_gains={"post_ffw_norm.weight": 3.0, "output_norm.weight": 6.0},
    ),
    "phi3": Plan(block=_dense(qkv="fused", ffn="fused"), metadata=_rotary),
    "granite": Plan(block=_dense(), metadata=lambda _: _GRANITE_SCALES, **_SCALED),
    "granitemoe": Plan(block=_dense(ffn="experts"), metadata=lambda _: _GRANITE_SCALES, **_SCALED),
    "minicpm": Plan(block=_dense(), metadata=_rotary, **_SCALED),
    "olmo2": Plan(block=_dense(qk_norm="full", norms=_POST)),
    "gpt-oss": Plan(
        block=_dense(
            norms=("attn_norm", "post_attention_norm"),
            qkv_bias=True,
            out_bias=True,
            ffn="experts",
            ffn_bias=True,
            more=lambda s: {"attn_sinks.weight": (s.n_head,)},
        ),
        metadata=lambda s: _head_lengths(s) | _windowed(s) | _expert_width(s),
    ),
    "seed_oss": Plan(block=_dense(norms=("attn_norm", "post_attention_norm"), qkv_bias=True), metadata=_head_lengths),
    "smollm3": Plan(block=_dense(), metadata=_rotary),
    "command-r": Plan(block=_dense(norms=("attn_norm",)), metadata=lambda _: {"logit_scale": 0.5}, tied=True),
    "cohere2": Plan(
        block=_dense(norms=("attn_norm",)), metadata=lambda s: _windowed(s) | {"logit_scale": 0.5}, tied=True
    ),
    "internlm2": Plan(block=_dense()),
    "exaone": Plan(block=_dense()),
    "stablelm": Plan(
        block=_dense(norm_bias=True), norm_bias=True, metadata=lambda s: {"rope.dimension_count": s.head_size // 4}
    ),
    "starcoder2": Plan(
        block=_dense(norm_bias=True, qkv_bias=True, out_bias=True, ffn="plain", ffn_bias=True), norm_bias=True
    ),
    "nemotron": Plan(
        block=_dense(norm_bias=True, ffn="plain"),
        norm_bias=True,
        metadata=lambda s: {"rope.dimension_count": s.head_size // 2},
    ),
    "mamba": Plan(block=lambda s, _: _mamba(s), metadata=_mamba_values),
    "mamba2": Plan(block=lambda s, _: _mamba2(s), metadata=_mamba2_values),
    "jamba": Plan(
        block=_hybrid(lambda s: _mamba(s, normed=True)), metadata=lambda s: _mamba_values(s) | _heads_by_layer(s)
    ),
    "falcon-h1": Plan(block=_falcon_h1, metadata=lambda s: _mamba2_values(s) | _head_lengths(s)),
    "granitehybrid": Plan(
        block=_hybrid(_mamba2),
        metadata=lambda s: _GRANITE_SCALES | _mamba2_values(s) | _heads_by_layer(s),
        **_SCALED,
    ),
    "lfm2": Plan(
        block=_hybrid(_short_convolution, qk_norm="head"),
        metadata=lambda s: _heads_by_layer(s) | {"shortconv.l_cache": 3},
        norm="token_embd_norm",
        tied=True,
        norm_gains={"token_embd_norm.weight": 4.0},
    ),
}
