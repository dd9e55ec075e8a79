"""What is installed here: which llama.cpp, held against the pin; which tap; which processor.  Behind ``doctor``."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from hotkv_trio.llama import _ffi, _tap
from hotkv_trio.llama._engine import _processors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotkv_trio.llama._tap import TapKind

PINNED_VERSION: Final = "0.3.36"
"""The llama-cpp-python that everything was proven with; ``native/pin.toml`` says the same."""

_PACKAGES: Final = ("hotkv-trio", "llama-cpp-python", "trio", "numpy", "gguf", "attrs", "msgspec", "cyclopts", "rich")


@attrs.frozen(kw_only=True)
class Installation:
    """What ``doctor`` shows."""

    python: str
    system: str
    packages: Mapping[str, str]
    """Name -> version."""
    pinned_version: str
    """Of llama-cpp-python."""
    llama_cpp_commit: str
    """As the loaded library says it, abbreviated."""
    pinned_commit: str
    tap: TapKind
    """The one that a shard's engine takes by itself."""
    tap_reason: str
    """Where the native one lies, or why it is not used."""
    processor: str
    features: tuple[str, ...]
    """What llama.cpp makes use of."""
    processors: int
    """That this process may use: an engine's threads, unless it is told another number."""

    @property
    def is_pinned_version(self) -> bool:
        """Whether llama-cpp-python is the one that everything was proven with."""
        return self.packages["llama-cpp-python"] == self.pinned_version

    @property
    def is_pinned_commit(self) -> bool:
        """Whether the loaded llama.cpp is."""
        return self.pinned_commit.startswith(self.llama_cpp_commit)


def read_installation() -> Installation:
    """Look at what is installed.  Loads llama.cpp, but no model."""
    tap, why = _tap_in_use()
    return Installation(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages={name: importlib.metadata.version(name) for name in _PACKAGES},
        pinned_version=PINNED_VERSION,
        llama_cpp_commit=_ffi.commit(),
        pinned_commit=_ffi.PINNED_COMMIT,
        tap=tap,
        tap_reason=why,
        processor=_processor(),
        features=_features(_ffi.system_info()),
        processors=_processors(),
    )


def _tap_in_use() -> tuple[TapKind, str]:
    try:
        _tap._native_library()
    except OSError as error:
        return "python", str(error)
    return "native", str(_tap.native_path())


def _processor() -> str:
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        described = ""
    found = re.search(r"(?m)^model name\s*:\s*(.+)$", described)
    return found[1] if found else platform.processor() or platform.machine()


def _features(described: str) -> tuple[str, ...]:
    """Return the features that llama.cpp's own line says it uses: ``CPU : AVX2 = 1 | FMA = 1 | …``."""
    return tuple(re.findall(r"(\w+) = 1\b", described))
