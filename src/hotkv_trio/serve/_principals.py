"""Who a connection belongs to, and what their sessions are called inside the runtime."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotkv_trio._errors import InvalidInput
from hotkv_trio._keys import SessionKey

if TYPE_CHECKING:
    from collections.abc import Iterable

MIN_TOKEN = 16
"""Characters."""
_SHORT = f"a token is text of at least {MIN_TOKEN} characters"
TOKEN_VARIABLE = "HOTKV_TOKEN"  # noqa: S105 - the name of a variable
ANYBODY = ""
"""The principal of a server without tokens."""


def read_tokens(path: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the tokens in a file, one a line, or without one in ``HOTKV_TOKEN``; empty lines and ``#`` are skipped.

    Raises:
        InvalidInput: one is too short; or the file is no text, or holds none.
        OSError: the file cannot be read.
    """
    try:
        text = os.environ.get(TOKEN_VARIABLE, "") if path is None else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} holds no tokens: it is no text in UTF-8") from None
    numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    found = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    for number, line in found:
        if len(line) < MIN_TOKEN:
            raise InvalidInput(f"line {number} of {path or TOKEN_VARIABLE}: {_SHORT}")
    if path is not None and not found:
        # Who names a file wants tokens to be asked for.
        raise InvalidInput(f"{path} holds no tokens")
    return [line for _, line in found]


def check_tokens(tokens: Iterable[Any]) -> list[str]:
    """Return them as a list.

    Raises:
        InvalidInput: one is too short to be hard to guess.
    """
    checked = list(tokens)
    if any(not isinstance(token, str) or len(token) < MIN_TOKEN for token in checked):
        raise InvalidInput(_SHORT)
    return checked


class Principals:
    """Tokens, and the name space of each one's sessions.

    A token is compared by a keyed digest, with every known one, in a time that depends on neither.

    Args:
        tokens: what is accepted; empty: anybody, without one.
    """

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        # Fresh in each process: nobody outside can compute a digest or a name.
        self._secret = os.urandom(32)
        self._known = [self._digest(b"token", token) for token in check_tokens(tokens)]

    @property
    def has_token(self) -> bool:
        """Whether a token is needed."""
        return bool(self._known)

    def authenticate(self, token: str | None) -> str | None:
        """Return the principal that a token stands for, or None if it is not known."""
        if not self._known:
            return ANYBODY
        offered = self._digest(b"token", token or "")
        matches = [hmac.compare_digest(offered, known) for known in self._known]
        return offered.hex() if any(matches) else None

    def inner_key(self, principal: str, key: SessionKey) -> SessionKey:
        """Return the runtime's key for a principal's: in a name space of its own, and not to be guessed."""
        name = self._digest(b"session", principal, key.route_session_id)
        return SessionKey(name.hex(), key.route_epoch)

    def _digest(self, person: bytes, *parts: str) -> bytes:
        digest = hashlib.blake2b(digest_size=32, key=self._secret, person=person)
        for part in parts:
            # With its length before it, so that no two lists of parts read the same.
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return digest.digest()
