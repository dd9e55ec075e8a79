"""How arguments are written.  cyclopts reads these at run time, so that a command's module must import them so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from cyclopts import Parameter, validators

from hotkv_trio._errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cyclopts import Token


def _bytes(_: object, tokens: Sequence[Token]) -> int:
    # Not at the top: llama.cpp takes longer to load than a command without a model does.
    from hotkv_trio.llama._planning import parse_bytes

    try:
        return parse_bytes(tokens[0].value)
    except InvalidInput as refusal:
        raise ValueError(refusal.what) from None


def to_path(_: object, tokens: Sequence[Token]) -> Path:
    """Return a path; an empty text, as of a variable that is not set, would be the folder where one is."""
    if not tokens[0].value:
        raise ValueError("the path is empty; is a variable of the shell not set?")
    return Path(tokens[0].value)


SOME = validators.Number(gt=0)
"""More than none."""

ModelFile: TypeAlias = Annotated[
    Path, Parameter(name="FILE", converter=to_path, help="A GGUF file; of a split one, any part.")
]
OptionalModelFile: TypeAlias = Annotated[
    Path | None,
    Parameter(name="--model", converter=to_path, help="A GGUF file to open as well, to prove isolation on it."),
]
ShardFile: TypeAlias = Annotated[
    Path, Parameter(name="--out", converter=to_path, help="Where to write the shard; replaced only once it is whole.")
]
OptionalPath: TypeAlias = Annotated[Path | None, Parameter(converter=to_path)]
"""Its help is its own."""
Bytes: TypeAlias = Annotated[int | None, Parameter(converter=_bytes, validator=SOME)]
"""As 8GiB, 512MiB, 16GB or 1000; its help is its own."""
Some: TypeAlias = Annotated[int, Parameter(validator=SOME)]
"""One or more; its help is its own."""
LayerRange: TypeAlias = Annotated[
    str, Parameter(name="--layers", help="First layer and one past the last, as 0:15; 15: goes on to the last one.")
]
OptionalLayerRange: TypeAlias = Annotated[
    str | None, Parameter(name="--layers", help="First layer and one past the last, as 0:15; else all layers.")
]
TypeK: TypeAlias = Annotated[str, Parameter(name="--type-k", help="How keys are stored: f16, q8_0, …")]
TypeV: TypeAlias = Annotated[str, Parameter(name="--type-v", help="How values are stored.")]
AsJson: TypeAlias = Annotated[
    bool, Parameter(name="--json", negative=(), help="Print one JSON document on stdout instead of tables.")
]


def parse_layers(text: str, n_layer: int) -> tuple[int, int]:
    """Return the range that ``A:B`` says: A left out is 0, B left out is ``n_layer``.

    Raises:
        InvalidInput: it says no range.
    """
    matched = re.fullmatch(r"\s*(\d*)\s*:\s*(\d*)\s*", text)
    if matched is None:
        raise InvalidInput(f"{text!r} is no range of layers: write FIRST:END, as 0:{n_layer} for all of them")
    first, end = matched[1] or 0, matched[2] or n_layer
    return int(first), int(end)
