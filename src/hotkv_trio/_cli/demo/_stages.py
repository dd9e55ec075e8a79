"""The demo from beginning to end: each session alone, all together in exact mode, all together in grouped mode.

It knows engines by their protocol only, and shows nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from hotkv_trio._cli.demo._facts import Checks, DemoFacts, ModeFacts, SessionFacts
from hotkv_trio._cli.demo._grouped import exchanged, exchanges, play_grouped, repeated
from hotkv_trio._cli.demo._play import Difference, Incident, Part, Take, compare, play
from hotkv_trio._cli.demo._stage import Setting, Stage, Watcher, open_stage
from hotkv_trio._cli.demo._together import Together, Verdict
from hotkv_trio._keys import SessionKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotkv_trio._engine import EngineInfo, Memory


@attrs.frozen(eq=False)
class _Exact:
    """What exact mode showed."""

    info: EngineInfo
    solos: list[Take]
    verdicts: list[Verdict]
    together: Together
    facts: ModeFacts


@attrs.frozen(eq=False)
class _Grouped:
    """What grouped mode showed."""

    distances: list[Difference]
    """From the runs alone."""
    unmoved: list[bool | None]
    n_runs: int
    same_schedule: bool
    facts: ModeFacts


async def run_demo(setting: Setting, watcher: Watcher) -> DemoFacts:
    """Run every stage, and return what was found.

    Raises:
        InvalidInput: the model cannot be served.
        EngineFailed: it could not be loaded, or a native call failed.
    """
    exact = await _play_exact(setting, watcher)
    grouped = await _play_in_groups(setting, exact.solos, watcher)
    together = exact.together
    return DemoFacts(
        model=setting.model,
        architecture=exact.info.recipe.architecture,
        memory=exact.info.memory,
        n_vocab=exact.info.n_vocab,
        context_tokens=exact.info.n_ctx_seq,
        sessions=tuple(
            _session_facts(setting, solo.part, verdict, distance, unmoved=unmoved)
            for solo, verdict, distance, unmoved in zip(
                exact.solos, exact.verdicts, grouped.distances, grouped.unmoved, strict=True
            )
        ),
        exact=exact.facts,
        grouped=grouped.facts,
        exchanged_runs=grouped.n_runs,
        truncation_shown=_can_truncate(exact.info.memory),
        checks=Checks(
            superseded_refused=together.superseded_refused,
            evicted_told=together.evicted_told,
            visitor_equal_to_solo=together.visitor_equal,
            cancelled_stopped=together.cancelled_stopped,
            same_schedule=grouped.same_schedule,
            everything_given_back=exact.facts.clean and grouped.facts.clean,
        ),
    )


def cast_parts(setting: Setting, memory: Memory) -> list[Part]:
    """Give each session its part: incidents befall the second session and those after it, in turn.

    So the first has a quiet life; if it is the only one, everything befalls it.
    """
    count = len(setting.prompts)
    victims = range(1, count) if count > 1 else range(1)
    befall: list[set[Incident]] = [set() for _ in range(count)]
    possible = [it for it in Incident if it is not Incident.TRUNCATED or _can_truncate(memory)]
    for number, incident in enumerate(possible):
        befall[victims[number % len(victims)]].add(incident)
    return [
        Part(str(number), prompt, setting.n_decodes, frozenset(incidents))
        for number, (prompt, incidents) in enumerate(zip(setting.prompts, befall, strict=True), 1)
    ]


async def _play_exact(setting: Setting, watcher: Watcher) -> _Exact:
    async with open_stage(setting, watcher, exact=True) as stage:
        info = stage.runtime.info
        parts = cast_parts(setting, info.memory)
        watcher.begin("each session alone", _n_tokens(parts))
        solos = [await _play_alone(stage, part) for part in parts]
        begun = len(stage.calls)
        watcher.begin("all together, each with native calls of its own (exact mode)", _n_tokens(parts))
        together = Together(stage, solos)
        await together.run()
    verdicts = [together.verdict(solo) for solo in solos]
    # The logits of a large vocabulary fill the memory.
    together.takes.clear()
    return _Exact(info, solos, verdicts, together, stage.facts(stage.calls[begun:]))


async def _play_alone(stage: Stage, part: Part) -> Take:
    take = Take(part)
    async with stage.runtime.open_session(SessionKey(part.name, 0)) as session:
        await play(session, take)
    return take


async def _play_in_groups(setting: Setting, solos: Sequence[Take], watcher: Watcher) -> _Grouped:
    n_tokens = _n_tokens([solo.part for solo in solos])
    async with open_stage(setting, watcher, exact=False) as stage:
        watcher.begin("all together, sharing native calls (grouped mode)", n_tokens)
        first = await play_grouped(stage, [repeated(solo) for solo in solos])
        distances = [compare(take.rows, solo.rows) for take, solo in zip(first.takes, solos, strict=True)]
        for solo in solos:
            solo.rows.clear()
        unmoved: list[bool | None] = [None] * len(solos)
        same_schedule = True
        keepers = list(exchanges(len(solos)))
        for number, kept in enumerate(keepers, 1):
            watcher.begin(f"again, with other neighbours ({number} of {len(keepers)})", n_tokens)
            again = await play_grouped(
                stage,
                [
                    repeated(solo) if i in kept else exchanged(solo, stage.runtime.info.n_vocab, (number, i))
                    for i, solo in enumerate(solos)
                ],
            )
            same_schedule = same_schedule and again.schedule == first.schedule
            for i in kept:
                same = compare(again.takes[i].rows, first.takes[i].rows).equal
                unmoved[i] = same and unmoved[i] is not False
            # Its logits need not lie there beside the next run's.
            again.takes.clear()
    return _Grouped(distances, unmoved, len(keepers), same_schedule, stage.facts(first.calls))


def _session_facts(
    setting: Setting, part: Part, verdict: Verdict, distance: Difference, *, unmoved: bool | None
) -> SessionFacts:
    ended = [incident.value for incident in Incident if incident in part.incidents]
    if Incident.CANCELLED not in part.incidents:
        ended.append("finished")
    return SessionFacts(
        name=part.name,
        prompt_tokens=len(part.prompt.tokens),
        generated_tokens=verdict.decoded,
        prompt=part.prompt.text,
        continuation=None if setting.to_text is None else setting.to_text(verdict.continuation),
        equal_to_solo=verdict.equal,
        logits_compared=verdict.n_compared,
        unmoved=unmoved,
        max_difference_to_solo=distance.max_abs,
        same_top_as_solo=distance.same_top,
        ended=", then ".join(ended),
    )


def _can_truncate(memory: Memory) -> bool:
    return memory in {"attention", "sliding"}


def _n_tokens(parts: Sequence[Part]) -> int:
    return sum(len(part.prompt.tokens) + part.n_decodes for part in parts)
