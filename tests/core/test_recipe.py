"""CacheRecipe: every field changes the digest, and a difference names the fields and both values."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from hotkv_trio import CacheRecipe, RecipeMismatch
from hotkv_trio.testing import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable

RECIPE = FakeEngine().open().recipe
FIELDS = [field.name for field in attrs.fields(CacheRecipe)]
OTHER: dict[type, Callable[[Any], Any]] = {
    bool: operator.not_,
    int: lambda value: value + 1,
    float: lambda value: value + 1e-9,
    str: lambda value: value + "x",
    tuple: lambda value: (*value, *(value[-1:] or ("x",))),
}


def other(field: str) -> CacheRecipe:
    value: Any = getattr(RECIPE, field)
    return attrs.evolve(RECIPE, **{field: OTHER[type(value)](value)})


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_changes_the_digest_and_is_named(field: str) -> None:
    theirs = other(field)
    assert theirs.digest() != RECIPE.digest()
    assert RECIPE.difference(theirs) == {field: (getattr(RECIPE, field), getattr(theirs, field))}
    with pytest.raises(RecipeMismatch) as caught:
        RECIPE.require(theirs)
    assert list(caught.value.fields) == [field]
    assert field in str(caught.value)


def test_all_digests_of_single_changes_differ() -> None:
    digests = {other(field).digest() for field in FIELDS} | {RECIPE.digest()}
    assert len(digests) == len(FIELDS) + 1


def test_equal_recipes_have_equal_digests_and_are_accepted() -> None:
    copy = attrs.evolve(RECIPE)
    assert copy is not RECIPE
    assert copy.digest() == RECIPE.digest()
    assert RECIPE.difference(copy) == {}
    RECIPE.require(copy)


def test_the_digest_is_stable() -> None:
    """It is kept by clients and compared between versions: whoever changes the encoding must mean to."""
    assert RECIPE.digest() == DIGEST


def test_every_difference_is_said_at_once() -> None:
    theirs = attrs.evolve(RECIPE, n_swa=7, layout="unified")
    with pytest.raises(RecipeMismatch) as caught:
        RECIPE.require(theirs)
    assert caught.value.fields == {"n_swa": (0, 7), "layout": ("streams", "unified")}


DIGEST = "fc6822537f481b7e931681eebedf072818214c868656cc2d4342165fb1752a92"
