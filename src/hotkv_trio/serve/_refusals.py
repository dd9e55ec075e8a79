"""Errors as replies and back, one to one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from hotkv_trio._errors import (
    BudgetExceeded,
    CacheMiss,
    ContextFull,
    EngineFailed,
    HotKVError,
    InvalidInput,
    PositionMismatch,
    RecipeMismatch,
    RuntimeClosed,
    SessionExists,
    StaleEpoch,
    TruncateUnsupported,
)
from hotkv_trio._keys import SessionKey
from hotkv_trio.serve import _messages as m
from hotkv_trio.serve._errors import LimitExceeded, ProtocolError, ShardDraining, Unauthorised

if TYPE_CHECKING:
    from collections.abc import Callable

_REPLY_OF: dict[type[HotKVError], type[m.Reply]] = {
    CacheMiss: m.CacheMissReply,
    StaleEpoch: m.StaleEpochReply,
    RecipeMismatch: m.RecipeMismatchReply,
    PositionMismatch: m.PositionMismatchReply,
    BudgetExceeded: m.BudgetExceededReply,
    ContextFull: m.ContextFullReply,
    InvalidInput: m.InvalidInputReply,
    TruncateUnsupported: m.TruncateUnsupportedReply,
    SessionExists: m.SessionExistsReply,
    EngineFailed: m.EngineFailedReply,
    RuntimeClosed: m.RuntimeClosedReply,
    ProtocolError: m.ProtocolErrorReply,
    Unauthorised: m.UnauthorisedReply,
    LimitExceeded: m.LimitExceededReply,
    ShardDraining: m.ShardDrainingReply,
}
_ERROR_OF = {reply: error for error, reply in _REPLY_OF.items()}


def refusal_of(error: HotKVError, request: int, key: SessionKey | None = None) -> m.Refusal:
    """Return the reply that carries an error.

    Args:
        error: what was raised.
        request: the request's id.
        key: the session as the client names it; the error's own key is one of the runtime's.
    """
    reply = _REPLY_OF[type(error)]
    fields: dict[str, Any] = {}
    for name in reply.__struct_fields__:
        if name in {"session", "epoch"}:
            of = key or error.key  # type: ignore[attr-defined]
            fields[name] = of.route_session_id if name == "session" else of.route_epoch
        elif name != "id":
            fields[name] = getattr(error, name)
    return reply(id=request, **fields)  # type: ignore[return-value]


def error_of(refusal: m.Reply) -> Exception:
    """Return the error that a refusal carries, with the client's own key.

    `CancelledReply` has none: it answers nobody but who cancelled.

    Raises:
        ProtocolError: what it carries is no such error.
    """
    if isinstance(refusal, m.WouldBlockReply):
        return trio.WouldBlock()
    make: Callable[..., HotKVError] = _ERROR_OF[type(refusal)]
    fields = {name: getattr(refusal, name) for name in refusal.__struct_fields__ if name != "id"}
    if "session" in fields:
        try:
            fields["key"] = SessionKey(fields.pop("session"), fields.pop("epoch"))
        except InvalidInput as exc:
            raise ProtocolError(f"a refusal for no session: {exc.what}") from None
    if isinstance(refusal, m.RecipeMismatchReply):
        fields["fields"] = {name: (_value(ours), _value(theirs)) for name, (ours, theirs) in refusal.fields.items()}
    return make(**fields)


def _value(value: Any) -> Any:
    """Return a recipe's value as a recipe has it: a tuple where msgpack has an array."""
    return tuple(map(_value, value)) if isinstance(value, list) else value
