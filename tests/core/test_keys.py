"""SessionKey: the pair, and that nothing takes the id alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import hotkv_trio
from hotkv_trio import InvalidInput, Runtime, SessionKey
from tests.core._rig import key, open_rig


@pytest.mark.parametrize("name", ["a", "x" * 128, "route-7f", "Ü 文", "a/b:c@d"])
@pytest.mark.parametrize("epoch", [0, 1, 2**63 - 1])
def test_a_key_is_a_printable_id_and_an_epoch(name: str, epoch: int) -> None:
    assert str(SessionKey(name, epoch)) == f"{name}@{epoch}"
    assert SessionKey(name, epoch) == SessionKey(name, epoch)
    assert hash(SessionKey(name, epoch)) == hash(SessionKey(name, epoch))


@pytest.mark.parametrize("name", ["", "x" * 129, "a\n", "\x00", "\x1b[2J", "a\u2028b", "\ud800", None, 1, b"a", ["a"]])
def test_an_id_that_is_not_printable_or_too_long_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInput, match="route_session_id"):
        SessionKey(name, 0)


@pytest.mark.parametrize("epoch", [-1, 2**63, 1.0, True, None, "1", float("nan")])
def test_an_epoch_that_is_no_integer_from_zero_is_refused(epoch: Any) -> None:
    with pytest.raises(InvalidInput, match="route_epoch"):
        SessionKey("a", epoch)


def test_a_key_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        key("a").route_epoch = 1  # type: ignore[misc]


def test_no_public_function_takes_an_id_without_its_epoch() -> None:
    """LMCache #2878, #4825, #3770: one call path forgot part of the key."""
    classes = [value for value in vars(hotkv_trio).values() if inspect.isclass(value) and value is not SessionKey]
    parameters = [
        (f"{owner.__name__}.{name}", parameter)
        for owner in classes
        for name, function in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_")
        for parameter in inspect.signature(function).parameters
    ]
    assert [where for where, parameter in parameters if parameter.startswith("route_")] == []
    taking = {where for where, parameter in parameters if parameter == "key" and where.startswith("Runtime.")}
    assert taking == {
        f"Runtime.{name}" for name in ("open_session", "serve_session", "start_session", "get", "release")
    }
    for where in taking:
        function = getattr(Runtime, where.removeprefix("Runtime."))
        assert inspect.signature(function).parameters["key"].annotation == "SessionKey"


@pytest.mark.parametrize("value", ["a", ("a", 0), None, 0])
async def test_what_is_no_key_is_refused_everywhere(value: Any) -> None:
    async with open_rig() as rig:
        runtime = rig.runtime
        with pytest.raises(InvalidInput, match="SessionKey"):
            async with runtime.open_session(value):
                pass
        with pytest.raises(InvalidInput, match="SessionKey"):
            await runtime.serve_session(value)
        with pytest.raises(InvalidInput, match="SessionKey"):
            await runtime.start_session(value)
        with pytest.raises(InvalidInput, match="SessionKey"):
            runtime.get(value)
        with pytest.raises(InvalidInput, match="SessionKey"):
            await runtime.release(value)
        assert rig.statistics.opened == 0
