"""What to do next, carried by the error itself as a note."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hotkv_trio._errors import HotKVError

if TYPE_CHECKING:
    from collections.abc import Generator

A_WHOLE_MODEL = "a whole GGUF file that can be read; one that was cut short or damaged has to be fetched again"
_A_PATH = "the path of a whole GGUF file"
WHAT_IT_WAS_CUT_FROM = "the file that it was cut from; with --layers, one takes a part of it"
WHO_MAY = "a --token-file that can be read, one token of 16 characters or more in a line; or the same in HOTKV_TOKEN"


@contextlib.contextmanager
def advising(
    advice: str, only: type[Exception] | tuple[type[Exception], ...] = (HotKVError, OSError)
) -> Generator[None]:
    """Give errors of a kind that leave the block a note of what to try, unless they have one."""
    try:
        yield
    except only as error:
        if not noted_advice(error):
            # What cannot even be read was not cut short.
            unread = advice == A_WHOLE_MODEL and isinstance(error.__cause__, OSError)
            error.add_note(_A_PATH if unread else advice)
        raise


def noted_advice(error: BaseException) -> str:
    """Return what an error's notes say; empty: it has none."""
    return "; ".join(getattr(error, "__notes__", ()))
