"""Turnstile: before each shard of a route, so that many sessions keep every shard busy, and with large groups.

A shard takes the decodes that wait there into one native call.  Left to themselves, a route's sessions end up all in
one group, which leaves every shard but one idle, or go one by one, which costs a native call each.  So they decode in
as many *teams* as there are shards, and each team goes through a shard together, as a *wave*: while one is at one
shard, others are at the next.  Team mates have neighbouring numbers, since slots are given out in the order of opening,
and only neighbouring slots share a native call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, final

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


@attrs.define(eq=False)
class _Wave:
    team: int
    inside: int = 0
    closed: bool = False
    """Somebody has come out already."""
    over: trio.Event = attrs.field(factory=trio.Event)


@final
class Turnstile:
    """Lets one wave through at a time; who has waited for longest says which team is next.

    Args:
        team_of: the team that a session's number is in, at this moment.
    """

    def __init__(self, team_of: Callable[[int], int]) -> None:
        self._team_of = team_of
        self._wave: _Wave | None = None
        self._waiting: dict[trio.Event, int] = {}

    def __repr__(self) -> str:
        inside = self._wave.inside if self._wave else 0
        return f"<Turnstile, {inside} inside, {len(self._waiting)} waiting>"

    async def run(self, number: int, step: Callable[[], Awaitable[T]]) -> T:
        """Make a step in a wave, and return its result once the wave is over, so that team mates go on together.

        It must not take long: others wait for it.  A step that raises keeps nobody waiting.
        """
        wave = await self._enter(number)
        try:
            result = await step()
        finally:
            self._leave(wave)
        await wave.over.wait()
        return result

    async def _enter(self, number: int) -> _Wave:  # noqa: ASYNC910 - the step checkpoints
        team, wave = self._team_of(number), self._wave
        if wave is None:
            wave = self._wave = _Wave(team)
        elif team != wave.team or wave.closed or self._waiting:
            admitted = trio.Event()
            self._waiting[admitted] = number
            try:
                await admitted.wait()
            except BaseException:
                if not admitted.is_set():
                    del self._waiting[admitted]
                elif self._wave is not None:
                    self._leave(self._wave)
                raise
            if self._wave is None:
                raise RuntimeError("admitted to no wave")
            return self._wave
        wave.inside += 1
        return wave  # noqa: ASYNC910

    def _leave(self, wave: _Wave) -> None:
        wave.inside -= 1
        wave.closed = True
        if wave.inside:
            return
        wave.over.set()
        if not self._waiting:
            self._wave = None
            return
        self._wave = wave = _Wave(self._team_of(next(iter(self._waiting.values()))))
        for admitted, number in list(self._waiting.items()):
            if self._team_of(number) == wave.team:
                wave.inside += 1
                del self._waiting[admitted]
                admitted.set()
