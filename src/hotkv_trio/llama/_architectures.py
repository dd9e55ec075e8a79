"""Which architectures may be served as ranges of layers, where each may be cut, and what its shards must be told.

An architecture is here only if a test shows that tiny models of it, cut in two and in three at every valid place,
compute the uncut model's logits bit for bit.  Everything else is refused by name, with the reason where it is known.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import attrs
import numpy as np

from hotkv_trio._errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hotkv_trio.llama._facts import ModelFacts

Factor: TypeAlias = Literal["one", "sqrt_n_embd"]
"""What llama.cpp multiplies the embeddings of tokens by, but not embeddings that it is given."""


def _nothing(_: ModelFacts) -> dict[str, Any]:
    return {}


def _no_objection(_: ModelFacts) -> str | None:
    return None


@attrs.frozen(kw_only=True)
class Architecture:
    """How shards of one architecture are made and joined."""

    name: str
    """As GGUF spells it."""
    boundary: str = "l_out-{layer}"
    """Name of the tensor that leaves a layer of a shard, numbered from the shard's own first."""
    factor: Factor = "one"
    """Of embeddings looked up outside."""
    cuts: Callable[[ModelFacts], Iterable[int]] = lambda facts: range(1, facts.n_layer)
    """Where the model may be cut, ascending."""
    cut_rule: str = "it may be cut anywhere"
    """The same in words."""
    pinned: Callable[[ModelFacts], dict[str, Any]] = _nothing
    """Values that llama.cpp derives from the number of layers where the file does not state them."""
    later: Mapping[str, Any] = attrs.field(factory=dict)
    """Values for shards after the first: those whose effect must not happen twice."""
    needs_head: bool = False
    """Whether llama.cpp insists on ``output.weight``, so that it cannot stand in for the embeddings."""
    objection: Callable[[ModelFacts], str | None] = _no_objection
    """Why this very model cannot be cut, if it cannot."""


def _periods(good: Callable[[ModelFacts, int, int], bool]) -> Callable[[ModelFacts], Iterable[int]]:
    """Return the rule that cuts into periods, as short as may be, that are each a good range."""

    def cuts(facts: ModelFacts) -> Iterable[int]:
        for step in range(1, facts.n_layer):
            found = [cut for cut in range(step, facts.n_layer, step) if good(facts, cut, facts.n_layer)]
            if found and all(good(facts, first, end) for first, end in itertools.pairwise((0, *found))):
                return found
        return ()

    return cuts


def _both_kinds(facts: ModelFacts, first: int, end: int) -> bool:
    return len(set(facts.recurrent[first:end])) == 2


def _some_window(facts: ModelFacts, first: int, end: int) -> bool:
    return any(facts.sliding[first:end]) or not any(facts.sliding)


_HYBRID: Final[Mapping[str, Any]] = {
    "cuts": _periods(_both_kinds),
    "cut_rule": "each shard needs layers that attend and layers that keep a state",
}
_WINDOWED: Final[Mapping[str, Any]] = {
    "cuts": _periods(_some_window),
    "cut_rule": "each shard needs a layer with a sliding window",
}


def _gemma3_objection(facts: ModelFacts) -> str | None:
    if facts.n_layer == 62:
        return "llama.cpp tells the 27B's attention scale by its 62 layers, which no shard has"
    return None


def _granite_objection(facts: ModelFacts) -> str | None:
    if facts.n_deepstack:
        return "its vision layers take the embeddings of earlier layers (deepstack)"
    return None


def _command_r_objection(facts: ModelFacts) -> str | None:
    if facts.n_layer >= 64:
        return "llama.cpp tells whether its queries and keys are normalised by its 64 layers, which no shard has"
    return None


def _minicpm_pinned(facts: ModelFacts) -> dict[str, Any]:
    return {"residual_scale": float(np.float32(1.4) / np.sqrt(np.float32(facts.n_layer)))}


_UNSCALED: Final[Mapping[str, Any]] = {"embedding_scale": 0.0}

_SUPPORTED: Final = (
    Architecture(name="llama"),
    Architecture(name="qwen2"),
    Architecture(name="qwen3"),
    Architecture(name="qwen3moe"),
    Architecture(name="gemma3", factor="sqrt_n_embd", objection=_gemma3_objection),
    Architecture(name="phi3"),
    Architecture(name="granite", later=_UNSCALED, objection=_granite_objection),
    Architecture(name="granitemoe", later=_UNSCALED),
    Architecture(name="minicpm", later=_UNSCALED, pinned=_minicpm_pinned),
    Architecture(name="mistral3"),
    Architecture(name="qwen2moe", needs_head=True),
    Architecture(name="olmo2", needs_head=True),
    Architecture(name="gpt-oss", needs_head=True, **_WINDOWED),
    Architecture(name="seed_oss"),
    Architecture(
        name="smollm3",
        cuts=lambda facts: range(4, facts.n_layer, 4),
        cut_rule="every fourth layer has no rotary position, counted from the shard's first",
    ),
    Architecture(name="command-r", objection=_command_r_objection),
    Architecture(name="cohere2", **_WINDOWED),
    Architecture(name="internlm2", needs_head=True),
    Architecture(name="exaone"),
    Architecture(name="stablelm", needs_head=True),
    Architecture(name="starcoder2"),
    Architecture(name="nemotron", needs_head=True),
    Architecture(name="mamba"),
    Architecture(name="mamba2"),
    Architecture(name="jamba", **_HYBRID),
    Architecture(name="falcon-h1"),
    Architecture(name="granitehybrid", later=_UNSCALED, **_HYBRID),
    Architecture(name="lfm2", **_HYBRID),
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {architecture.name: architecture for architecture in _SUPPORTED}
"""The supported ones, by name."""

REFUSED: Final[Mapping[str, str]] = {
    "bloom": "it normalises what it is given as embeddings, so a later shard would do so twice",
    "deepseek4": "its layers read the tokens themselves",
    "exaone4": "llama.cpp tells whether it has a sliding window by its 64 layers, which no shard has",
    "gemma": "it scales what it is given as embeddings, so a later shard would do so twice",
    "gemma2": "it scales what it is given as embeddings, so a later shard would do so twice",
    "gemma3n": "each of its layers reads the tokens themselves (per-layer embeddings)",
    "gemma4": "each of its layers reads the tokens themselves (per-layer embeddings)",
    "glm4": "llama.cpp ends the process when it is given embeddings",
    "glm4moe": "llama.cpp ends the process when it is given embeddings",
    "gpt2": "it adds a position to what it is given as embeddings, so a later shard would do so twice",
    "granite-switch": "llama.cpp ends the process when it is given embeddings",
    "mpt": "it adds a position to what it is given as embeddings, so a later shard would do so twice",
    "starcoder": "it adds a position to what it is given as embeddings, so a later shard would do so twice",
    "t5": "it has an encoder and a decoder",
}
"""Why some others cannot be cut."""


def uncut_reason(facts: ModelFacts) -> str | None:
    """Return in a few words why the model cannot be cut; None: it can."""
    if facts.shard is not None:
        return "it is a shard (layers {}:{})".format(*facts.shard)
    architecture = ARCHITECTURES.get(facts.architecture)
    if architecture is None:
        why = REFUSED.get(facts.architecture, "no test has shown its shards to be exact")
        return f"architecture {facts.architecture!r}: {why}"
    if facts.n_layer_nextn:
        return "it has extra blocks for multi-token prediction"
    return architecture.objection(facts)


def architecture_of(facts: ModelFacts) -> Architecture:
    """Return how the model's shards are made.

    Raises:
        InvalidInput: its architecture, or this very model, cannot be cut; it says why, and what would work.
    """
    facts.require_model()
    if why := uncut_reason(facts):
        others = f", or a model of one of: {', '.join(sorted(ARCHITECTURES))}"
        raise InvalidInput(
            f"{facts.path.name} cannot be served by ranges of layers: {why}."
            f"  Serve all its layers together{'' if facts.architecture in ARCHITECTURES else others}"
        )
    return ARCHITECTURES[facts.architecture]


def valid_cuts(facts: ModelFacts) -> tuple[int, ...]:
    """Return the layers at which the model may be cut, ascending, without 0 and ``n_layer``.

    Raises:
        InvalidInput: as `architecture_of`.
    """
    return tuple(architecture_of(facts).cuts(facts))


def check_range(facts: ModelFacts, layers: tuple[int, int]) -> Architecture:
    """Return how the model's shards are made, if this range of layers may be one.

    Raises:
        InvalidInput: as `architecture_of`; or no such range; or an end of it is no valid cut: the nearest are named.
    """
    first, end = facts.check_layers(layers)
    architecture = architecture_of(facts)
    cuts = {0, *valid_cuts(facts), facts.n_layer}
    for cut in (first, end):
        if cut not in cuts:
            below, above = max(good for good in cuts if good < cut), min(good for good in cuts if good > cut)
            raise InvalidInput(
                f"{facts.path.name} cannot be cut at layer {cut}: of architecture {facts.architecture!r},"
                f" {architecture.cut_rule}; the nearest valid cuts are {below} and {above}"
            )
    return architecture


def embedding_factor(facts: ModelFacts) -> np.float32:
    """Return what a token's embedding is multiplied by before it is given to the first shard."""
    scaled = architecture_of(facts).factor == "sqrt_n_embd"
    return np.sqrt(np.float32(facts.n_embd)) if scaled else np.float32(1)
