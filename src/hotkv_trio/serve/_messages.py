"""The messages, as typed structs: each is the header of one frame.

A header is a msgpack map.  ``t`` says which message it is; unknown fields are refused, and fields with their default
value are left out.  A refusal is a reply whose ``t`` is the error's ``code``, with the error's own fields.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from hotkv_trio._engine import Memory, Output  # noqa: TC001 - msgspec reads annotations
from hotkv_trio._errors import MissReason  # noqa: TC001
from hotkv_trio._recipe import CacheRecipe  # noqa: TC001
from hotkv_trio._statistics import RuntimeStatistics  # noqa: TC001
from hotkv_trio.serve._tensors import HiddenDtype, Tensor  # noqa: TC001

PROTOCOL_VERSION = 1
MAX_INT = 2**63 - 1

RequestId: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", forbid_unknown_fields=True, omit_defaults=True):
    """The base of all messages."""


# From the client.


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """The first frame of a connection."""

    version: Count
    token: str | None = None
    recipe: CacheRecipe | None = None
    """What the client's cached KV counts on."""
    recipe_digest: str | None = None
    """The same, in short; one of the two is enough."""
    dtype: HiddenDtype = "float32"
    """What the client wants hidden states to travel as."""
    max_frame: Count
    """Bytes of a frame that the client takes."""


class Request(Message, frozen=True, kw_only=True):
    """The base of what is answered by exactly one reply of the same ``id``; ids only grow."""

    id: RequestId


class Ping(Request, tag="ping", frozen=True, kw_only=True):
    """Are you there?"""


class Stats(Request, tag="stats", frozen=True, kw_only=True):
    """What is there, of mine?"""


class SessionRequest(Request, frozen=True, kw_only=True):
    """The base of what concerns one session; carried out one after another, in order, for each session."""

    session: str
    epoch: int


class Open(SessionRequest, tag="open", frozen=True, kw_only=True):
    """Open a session."""

    recipe: CacheRecipe | None = None
    kept: bool = False
    """It stays hot when the connection ends."""
    wait: bool = True


class Get(SessionRequest, tag="get", frozen=True, kw_only=True):
    """Find an open session."""


class Prefill(SessionRequest, tag="prefill", frozen=True, kw_only=True):
    """Append tokens or hidden states."""

    at: Count | None = None
    output: Output = "last"
    tensor: Tensor


class Decode(SessionRequest, tag="decode", frozen=True, kw_only=True):
    """Append one token or hidden state."""

    at: Count | None = None
    tensor: Tensor


class Truncate(SessionRequest, tag="truncate", frozen=True, kw_only=True):
    """Cut a session back."""

    length: Count


class Release(SessionRequest, tag="release", frozen=True, kw_only=True):
    """End a session."""


class Cancel(Message, tag="cancel", frozen=True, kw_only=True):
    """Cancel a request of mine that is not answered yet.  It has no reply of its own."""

    id: RequestId


# From the server.


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts of the shard's engine: see `hotkv_trio.EngineInfo`."""

    n_slots: Count
    n_ctx_seq: Count
    bytes_per_token: Count
    slot_bytes: Count
    max_batch_tokens: Count
    max_outputs: Count
    n_vocab: Count
    n_embd: Count
    n_output: Count
    memory: Memory
    layers: tuple[Count, Count]
    layer_count: Count


class Welcome(Message, tag="welcome", frozen=True, kw_only=True):
    """The answer to a good hello: what this shard is, and what it takes."""

    version: Count
    recipe: CacheRecipe
    recipe_digest: str
    dtype: HiddenDtype
    """What hidden states travel as, both ways; logits are always float32."""
    facts: Facts
    max_frame: Count
    """Bytes of a frame that the server takes."""
    max_requests: Count
    max_queued_bytes: Count
    silence_timeout: Annotated[float, msgspec.Meta(gt=0)]
    """Seconds after which the server takes a client of whom nothing came for gone."""


class Goodbye(Message, tag="goodbye", frozen=True, kw_only=True):
    """The server closes the connection, and has answered all it will."""

    reason: str


class Reply(Message, frozen=True, kw_only=True):
    """The base of what answers the request of the same ``id``.  0: no single request, the connection is refused."""

    id: Count


class Pong(Reply, tag="pong", frozen=True, kw_only=True):
    """I am here."""


class SessionView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A moment's view of a session of the client's."""

    session: str
    epoch: int
    state: str
    length: int
    hot: bool
    kept: bool
    operations: int
    tokens_appended: int
    age: float
    """Seconds since it was opened."""
    idle: float | None
    """Seconds since it became idle; None: it is not."""


class Statistics(Reply, tag="statistics", frozen=True, kw_only=True):
    """What there is: totals of the shard, and the client's own sessions."""

    runtime: RuntimeStatistics
    sessions: tuple[SessionView, ...]
    connections: Count
    refusals: Count
    """Requests answered by a refusal since the server began."""


class Opened(Reply, tag="opened", frozen=True, kw_only=True):
    """The session is open."""

    length: Count


class Step(Reply, tag="step", frozen=True, kw_only=True):
    """It was appended."""

    position: Count
    length: Count
    tensor: Tensor


class Truncated(Reply, tag="truncated", frozen=True, kw_only=True):
    """It was cut."""


class Released(Reply, tag="released", frozen=True, kw_only=True):
    """The session has ended; its slot is free and its bytes are back."""

    existed: bool


# Refusals: replies too.


class CancelledReply(Reply, tag="cancelled", frozen=True, kw_only=True):
    """The request was cancelled, and left the session's length as it was."""


class WouldBlockReply(Reply, tag="would_block", frozen=True, kw_only=True):
    """``wait`` was false, and no slot could be had at once."""


class CacheMissReply(Reply, tag="cache_miss", frozen=True, kw_only=True):
    """See `hotkv_trio.CacheMiss`."""

    session: str
    epoch: int
    reason: MissReason
    resume_at: Count


class StaleEpochReply(Reply, tag="stale_epoch", frozen=True, kw_only=True):
    """See `hotkv_trio.StaleEpoch`."""

    session: str
    epoch: int
    current: Count


class RecipeMismatchReply(Reply, tag="recipe_mismatch", frozen=True, kw_only=True):
    """See `hotkv_trio.RecipeMismatch`: name -> (the server's value, the client's value)."""

    fields: dict[str, tuple[Any, Any]]


class PositionMismatchReply(Reply, tag="position_mismatch", frozen=True, kw_only=True):
    """See `hotkv_trio.PositionMismatch`."""

    at: Count
    length: Count


class BudgetExceededReply(Reply, tag="budget_exceeded", frozen=True, kw_only=True):
    """See `hotkv_trio.BudgetExceeded`."""

    requested: Count
    total: Count


class ContextFullReply(Reply, tag="context_full", frozen=True, kw_only=True):
    """See `hotkv_trio.ContextFull`."""

    length: Count
    limit: Count
    appended: Count


class InvalidInputReply(Reply, tag="invalid_input", frozen=True, kw_only=True):
    """See `hotkv_trio.InvalidInput`."""

    what: str


class TruncateUnsupportedReply(Reply, tag="truncate_unsupported", frozen=True, kw_only=True):
    """See `hotkv_trio.TruncateUnsupported`."""

    session: str
    epoch: int
    length: Count
    memory: str


class SessionExistsReply(Reply, tag="session_exists", frozen=True, kw_only=True):
    """See `hotkv_trio.SessionExists`."""

    session: str
    epoch: int


class EngineFailedReply(Reply, tag="engine_failed", frozen=True, kw_only=True):
    """See `hotkv_trio.EngineFailed`."""

    native_code: int | None
    what: str


class RuntimeClosedReply(Reply, tag="runtime_closed", frozen=True, kw_only=True):
    """See `hotkv_trio.RuntimeClosed`."""

    what: str


class ProtocolErrorReply(Reply, tag="protocol_error", frozen=True, kw_only=True):
    """See `ProtocolError`; the connection ends."""

    what: str


class UnauthorisedReply(Reply, tag="unauthorised", frozen=True, kw_only=True):
    """See `Unauthorised`; the connection ends."""


class LimitExceededReply(Reply, tag="limit_exceeded", frozen=True, kw_only=True):
    """See `LimitExceeded`."""

    what: str
    limit: Count


class ShardDrainingReply(Reply, tag="shard_draining", frozen=True, kw_only=True):
    """See `ShardDraining`."""


ClientMessage: TypeAlias = Hello | Ping | Stats | Open | Get | Prefill | Decode | Truncate | Release | Cancel
Refusal: TypeAlias = (
    CancelledReply
    | WouldBlockReply
    | CacheMissReply
    | StaleEpochReply
    | RecipeMismatchReply
    | PositionMismatchReply
    | BudgetExceededReply
    | ContextFullReply
    | InvalidInputReply
    | TruncateUnsupportedReply
    | SessionExistsReply
    | EngineFailedReply
    | RuntimeClosedReply
    | ProtocolErrorReply
    | UnauthorisedReply
    | LimitExceededReply
    | ShardDrainingReply
)
ServerMessage: TypeAlias = Welcome | Goodbye | Pong | Statistics | Opened | Step | Truncated | Released | Refusal

ANSWERS: dict[type[Request], type[Reply]] = {
    Ping: Pong,
    Stats: Statistics,
    Open: Opened,
    Get: Opened,
    Prefill: Step,
    Decode: Step,
    Truncate: Truncated,
    Release: Released,
}
"""The reply to each request that is not refused."""
