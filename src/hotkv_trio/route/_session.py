"""RouteSession: one history of tokens on all shards of a route, and its replay when a shard has lost it.

The history is kept here, as the calls that made it.  A shard that misses it, or is gone, is no error: the session is
opened at every shard under the next epoch, which fences off whatever is left of it anywhere, and the history is
replayed: call by call (``"exact"``: each native call has the shape that it had, so that every bit is what it would have
been), or in bulk (``"fast"``).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import attrs
import trio

from hotkv_trio._errors import CacheMiss, InvalidInput, MissReason, RuntimeClosed, StaleEpoch
from hotkv_trio._keys import SessionKey
from hotkv_trio.route._sampling import Sampler, greedy
from hotkv_trio.serve._errors import ConnectionLost, ShardDraining

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from hotkv_trio._engine import Output
    from hotkv_trio._errors import HotKVError
    from hotkv_trio.route._hop import Hop, HopSession
    from hotkv_trio.route._turnstile import Turnstile

logger = logging.getLogger("hotkv_trio")

Replay: TypeAlias = Literal["exact", "fast"]
"""How a lost history is put back."""

_LOST = (CacheMiss, StaleEpoch, RuntimeClosed, ConnectionLost, ShardDraining)
_FIRST_DELAY = 0.05
_LAST_DELAY = 1.0
"""Seconds before an attempt: before the second, doubled up to the last."""


@attrs.frozen(kw_only=True)
class Policy:
    """How a route's sessions go about their work."""

    replay: Replay
    prefill_chunk: int
    max_attempts: int
    jitter: Callable[[], float]


@attrs.frozen
class _Call:
    """Tokens that went through the route together."""

    tokens: tuple[int, ...]
    output: Output
    """What was asked of the last shard."""


@final
class RouteSession:
    """Generates tokens on a route; made by `Route.open_session`.

    After `trio.Cancelled`, and after any error, the history is what it was before the call; the shards are brought
    back to it by the next call.
    """

    def __init__(
        self, hops: Sequence[Hop], turnstiles: Sequence[Turnstile], number: int, key: SessionKey, policy: Policy
    ) -> None:
        self._hops = hops
        self._turnstiles = turnstiles
        self._number = number
        self._key = key
        self._next_epoch = key.route_epoch
        self._policy = policy
        self._calls: list[_Call] = []
        self._position = 0
        self._unseen: tuple[int, ...] = ()
        self._sessions: dict[Hop, HopSession] = {}
        """Also what is left of an older epoch at a shard that was not reached since."""
        self._ready = False
        self._ended = False
        self._replays = 0
        self._turn = trio.StrictFIFOLock()

    def __repr__(self) -> str:
        name = self._key.route_session_id
        return f"<hotkv_trio.route.RouteSession {name}, length {self._position}, {self._replays} replays>"

    @property
    def key(self) -> SessionKey:
        """The id, and the newest epoch used; before the first call, the epoch that it will use."""
        return self._key

    @property
    def history(self) -> tuple[int, ...]:
        """The tokens that the shards have seen, or will have again."""
        return tuple(token for call in self._calls for token in call.tokens)

    @property
    def replays(self) -> int:
        """How often the history was put back."""
        return self._replays

    @trio.as_safe_channel
    async def generate(  # noqa: ASYNC911 - append checkpoints
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        sampler: Sampler = greedy,
        stop: Iterable[int] = (),
    ) -> AsyncGenerator[int]:
        """Append a prompt and generate tokens after it, one at a time.

        ``async with session.generate(prompt, 32) as tokens:`` gives a channel to iterate over.  A token is computed
        when it is asked for.  What was generated is part of the history, so a later call goes on from there.

        Args:
            prompt: tokens; may be empty if something was generated before.
            max_tokens: how many to generate at most.
            sampler: picks each token.
            stop: tokens after which to stop; they are given out too.

        Raises:
            StaleEpoch: another client has taken over this route session id.
            CacheMiss: its scope has been left.
            CacheMiss, ConnectionLost, RuntimeClosed, ShardDraining: a shard did not come back for ``max_attempts``.
            HotKVError: a shard refused for another reason.
        """
        last = frozenset(stop)
        for number in range(max_tokens):
            logits = await self.append(() if number else prompt)
            token = sampler(logits)
            self._unseen = (token,)
            yield token
            if token in last:
                break

    async def append(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Send tokens through the route; return the row of the last one, float32 (n_output,).

        A token that `generate` gave out last goes before them: the shards have not seen it yet.  For errors see there.
        """
        async with self._turn:
            tokens = (*self._unseen, *tokens)
            if not tokens:
                raise InvalidInput("at least one token is needed")
            kept = len(self._calls), self._position
            chunk = self._policy.prefill_chunk
            row: npt.NDArray[np.float32] | None = None
            try:
                for begin in range(0, len(tokens), chunk):
                    part = tokens[begin : begin + chunk]
                    row = await self._persist(_Call(part, "last" if begin + chunk >= len(tokens) else "none"))
            except BaseException:
                del self._calls[kept[0] :]
                self._position = kept[1]
                self._ready = False
                raise
            self._unseen = ()
            if row is None:
                raise RuntimeError("a step without a row")
            return row

    # From here on: for the modules of this package.

    async def _close(self) -> None:  # noqa: ASYNC910
        """End the session at every shard that can be reached."""
        self._ended = True
        with trio.CancelScope(shield=True):  # noqa: ASYNC912 - each takes a bounded time
            for session in list(self._sessions.values()):
                await session.aclose()

    async def _persist(self, call: _Call) -> npt.NDArray[np.float32] | None:
        """Make a call, whatever happens to the shards meanwhile."""
        attempts = 0
        while True:
            if self._ended:
                await trio.lowlevel.checkpoint()
                raise CacheMiss(self._key, MissReason.RELEASED)
            try:
                if not self._ready:
                    await self._restore()
                rows = await self._forward(call, self._position)
            except _LOST as exc:
                attempts += 1
                self._ready = False
                if self._is_final(exc) or attempts >= self._policy.max_attempts:
                    raise
                delay = min(_FIRST_DELAY * 2 ** (attempts - 1), _LAST_DELAY) * (0.5 + self._policy.jitter() / 2)
                logger.info(
                    "a route session lost a shard",
                    extra={"code": exc.code, "attempt": attempts + 1, "delay": round(delay, 2)},
                )
                await trio.sleep(delay)
            else:
                self._calls.append(call)
                self._position += len(call.tokens)
                return rows[-1] if len(rows) else None

    def _is_final(self, error: HotKVError) -> bool:
        """Return whether somebody else holds the id: then it is theirs, and fencing them off in turn would not end."""
        return isinstance(error, StaleEpoch) and error.current >= self._next_epoch

    async def _restore(self) -> None:  # noqa: ASYNC910
        """Open the session at every shard under the next epoch, and put the history back."""
        key = self._key = SessionKey(self._key.route_session_id, self._next_epoch)
        self._next_epoch += 1
        # In the route's order, so that no two sessions wait for each other's slots.
        for hop in self._hops:
            session = self._sessions[hop] = await hop.open(key)
            if self._ended:
                await session.aclose()
                raise CacheMiss(key, MissReason.RELEASED)
        position = 0
        for call in self._history_calls():
            await self._forward(call, position)
            position += len(call.tokens)
        self._replays += bool(self._calls)
        self._ready = True

    def _history_calls(self) -> list[_Call]:
        if self._policy.replay == "exact":
            return self._calls
        history, chunk = self.history, self._policy.prefill_chunk
        return [_Call(history[begin : begin + chunk], "none") for begin in range(0, len(history), chunk)]

    async def _forward(self, call: _Call, position: int) -> Any:
        """Send a call through all shards; return the last one's rows."""
        data: Any = list(call.tokens)
        single = len(call.tokens) == 1 and call.output == "last"
        for hop, turnstile in zip(self._hops, self._turnstiles, strict=True):
            session = self._sessions[hop]
            if not single:
                output: Output = call.output if hop is self._hops[-1] else "all"
                result = await session.prefill(data, at=position, output=output)
            elif position and len(self._hops) > 1:
                result = await turnstile.run(self._number, partial(session.decode, data[0], at=position))
            else:
                # A session's first token may wait for a slot, which nobody else must wait for.
                result = await session.decode(data[0], at=position)
            data = result.output
        return data  # noqa: ASYNC910
