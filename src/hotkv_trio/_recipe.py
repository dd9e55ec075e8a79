"""CacheRecipe: everything that must agree for cached KV to mean the same."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import attrs

from hotkv_trio._errors import RecipeMismatch

RECIPE_VERSION = 1


@attrs.frozen(kw_only=True)
class CacheRecipe:
    """What cached KV depends on.  Two runtimes whose recipes are equal may stand in for each other.

    The engine makes it from the loaded model and context; a client sends the one that it expects.
    """

    model_digest: str
    """BLAKE2b of the tensors' names, types, shapes and bytes (hexadecimal)."""
    architecture: str
    layers: tuple[int, int]
    """First layer owned, and one past the last."""
    layer_count: int
    """Layers of the whole model."""
    engine: str
    """The engine and its version: for llama.cpp, its commit."""
    type_k: str
    type_v: str
    flash_attention: bool
    kv_rotation: bool
    """Hadamard rotation of quantised KV."""
    rope_freq_base: float
    rope_freq_scale: float
    yarn: tuple[float, ...]
    """YaRN: extension factor, attention factor, beta fast, beta slow, original context (empty: no RoPE)."""
    n_swa: int
    """Width of the sliding window in tokens; 0: none."""
    swa_full: bool
    """Whether sliding-window layers keep the full context."""
    layout: str
    """How sessions share a context: ``streams`` or ``unified``."""
    n_ctx_seq: int
    """Tokens that one session holds at most."""
    lora: tuple[str, ...] = ()
    """Digests of the LoRA adapters in use."""
    boundary_dtype: str = "float32"
    """dtype of the hidden states between shards."""
    version: int = RECIPE_VERSION

    def digest(self) -> str:
        """Return the BLAKE2b digest (hexadecimal, 32 bytes) of a canonical encoding of every field."""
        canonical = json.dumps(attrs.asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.blake2b(canonical.encode(), digest_size=32).hexdigest()

    def difference(self, other: CacheRecipe) -> dict[str, tuple[Any, Any]]:
        """Return each field whose values differ, as name -> (ours, theirs)."""
        return {
            field.name: (ours, theirs)
            for field in attrs.fields(CacheRecipe)
            if (ours := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        }

    def require(self, other: CacheRecipe) -> None:
        """Return only if ``other`` is the same recipe.

        Raises:
            RecipeMismatch: with each differing field and both values.
        """
        if different := self.difference(other):
            raise RecipeMismatch(different)
