"""A pytest plugin by entry point: it is there in every run, and does nothing unless ``hotkv_trio = true`` asks for it.

In ``pyproject.toml``::

    [tool.pytest.ini_options]
    hotkv_trio = true

The fixtures are in ``testing/_pytest_fixtures``.  This module is not: importing it would load llama.cpp into every run
of pytest, whoever's tests it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addini("hotkv_trio", "offer the fixtures hotkv_engine, hotkv_runtime and tiny_gguf", type="bool")


def pytest_configure(config: pytest.Config) -> None:
    """Offer the fixtures, if asked."""
    if config.getini("hotkv_trio"):
        from hotkv_trio.testing import _pytest_fixtures

        config.pluginmanager.register(_pytest_fixtures, "hotkv_trio_fixtures")
