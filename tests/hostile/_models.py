"""Tiny models of architectures on which llama.cpp ends the process for a value that others take.

They are no part of the library: it serves the first two as whole models only, and cuts none of them into shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from unittest.mock import patch

from hotkv_trio.llama import _tiny_gguf
from hotkv_trio.llama._tiny_plans import PLANS, Plan, Sizes, _dense

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from hotkv_trio.llama._tiny_plans import Values

TRAINED: Final = 100
"""Positions in the table of the learned-position model."""


def _mrope(s: Sizes) -> Values:
    sections = [s.head_size // 8, s.head_size // 8, s.head_size // 8, s.head_size // 8]
    return {"rope.dimension_sections": sections}


_PLANS: Final[Mapping[str, Plan]] = {
    "gpt2": Plan(
        block=_dense(norm_bias=True, qkv="fused", qkv_bias=True, out_bias=True, ffn="plain", ffn_bias=True),
        norm_bias=True,
    ),
    "glm4": Plan(
        block=_dense(norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), ffn="fused"),
        metadata=lambda s: {"rope.dimension_count": s.head_size},
    ),
    "qwen2vl": Plan(block=_dense(qkv_bias=True), metadata=_mrope),
}


def build(path: Path, arch: str) -> Path:
    """Write one of the three."""
    shapes = _tiny_gguf._shapes

    def with_positions(plan: Plan, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from shapes(plan, sizes)
        if arch == "gpt2":
            yield "position_embd.weight", (sizes.n_embd, sizes.n_ctx_train)

    with patch.object(_tiny_gguf, "PLANS", {**PLANS, **_PLANS}), patch.object(_tiny_gguf, "_shapes", with_positions):
        return _tiny_gguf.build_tiny_gguf(path, arch, n_layer=2, n_head_kv=2, n_ctx_train=TRAINED)
