"""How the facts look: tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from hotkv_trio._cli._output import plain, yes_no

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from hotkv_trio._cli.demo._facts import DemoFacts, SessionFacts

_SHOWN = 160
"""Characters shown of a long prompt: its end, which is what is continued."""


def show(facts: DemoFacts, console: Console) -> None:
    """Print what was found."""
    count = len(facts.sessions)
    console.print(
        f"\n[bold]{count} session{'s' * (count > 1)}[/] on ",
        Text(facts.model, style="bold"),
        f": {facts.architecture}, {facts.memory} memory, {facts.n_vocab:,} tokens in the vocabulary,"
        f" {facts.context_tokens} tokens a slot\n",
        sep="",
        highlight=False,
    )
    if any(session.prompt is not None for session in facts.sessions):
        console.print(_texts(facts.sessions))
        console.print()
    console.print(_sessions(facts.sessions))
    console.print()
    console.print(_modes(facts))
    console.print()
    for said, held in _checks(facts):
        console.print(yes_no(held), said, highlight=False)
    verdict = "All equal." if facts.ok else "Something differs that should not: see NO above."
    console.print(f"\n[bold {'green' if facts.ok else 'red'}]{verdict}[/]")


def _texts(sessions: Sequence[SessionFacts]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column()
    for session in sessions:
        prompt = _one_line(session.prompt or "")
        if len(prompt) > _SHOWN:
            prompt = f"… {prompt[-_SHOWN:].split(' ', 1)[-1]}"
        said = Text.assemble((f"{prompt} → ", "dim"), (_one_line(session.continuation or "").strip(), "bold"))
        table.add_row(session.name, said)
    return table


def _sessions(sessions: Sequence[SessionFacts]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        caption="exact: every logit, bit for bit. grouped: every bit, when the neighbours' tokens were exchanged; then"
        " the largest difference of a logit, and the share of calls with the same best token.",
        caption_justify="left",
    )
    table.add_column("session", justify="right")
    table.add_column("prompt\ntokens", justify="right")
    table.add_column("new\ntokens", justify="right")
    table.add_column("exact:\nequal to\nsolo run", justify="center")
    table.add_column("grouped:\nunmoved\nby others", justify="center")
    table.add_column("grouped:\nfar from\nsolo run", justify="right", no_wrap=True)
    table.add_column("how it ended")
    for session in sessions:
        table.add_row(
            session.name,
            str(session.prompt_tokens),
            str(session.generated_tokens),
            yes_no(session.equal_to_solo),
            Text("alone", style="dim") if session.unmoved is None else yes_no(session.unmoved),
            # 99.9 % is not all.
            f"{session.max_difference_to_solo:.2g} {math.floor(100 * session.same_top_as_solo):>4}%",
            session.ended,
        )
    return table


def _modes(facts: DemoFacts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column()
    table.add_column("exact", justify="right")
    table.add_column("grouped", justify="right")
    modes = (facts.exact, facts.grouped)
    table.add_row("prefill, tokens/s in native calls", *(f"{mode.prefill_tokens_per_second:,.0f}" for mode in modes))
    table.add_row("decode, tokens/s in native calls", *(f"{mode.decode_tokens_per_second:,.0f}" for mode in modes))
    table.add_row("native calls", *(f"{mode.native_calls:,}" for mode in modes))
    table.add_row("KV bytes before", *(f"{mode.kv_bytes_before:,}" for mode in modes))
    table.add_row("KV bytes at the peak", *(f"{mode.kv_bytes_peak:,}" for mode in modes))
    table.add_row("KV bytes after", *(f"{mode.kv_bytes_after:,}" for mode in modes))
    table.add_row("KV byte budget", *(f"{mode.kv_bytes_budget:,}" for mode in modes))
    table.add_row("tokens left in native sequences", *(f"{mode.tokens_left:,}" for mode in modes))
    return table


def _checks(facts: DemoFacts) -> Iterator[tuple[str, bool]]:
    compared = sum(session.logits_compared for session in facts.sessions)
    checks = facts.checks
    yield (
        f"exact: all {compared:,} logits are those of the sessions' solo runs, bit for bit",
        all(session.equal_to_solo for session in facts.sessions),
    )
    if facts.exchanged_runs:
        yield (
            f"grouped: {facts.exchanged_runs} runs with other neighbours moved no bit",
            all(session.unmoved for session in facts.sessions),
        )
        yield "grouped: all runs made the same native calls", checks.same_schedule
    yield "the evicted session was told so, and started again", checks.evicted_told
    yield "the session that took its slot got the logits of a run alone", checks.visitor_equal_to_solo
    yield "the superseded epoch was refused, by call and at opening", checks.superseded_refused
    yield "the cancelled session stopped in the middle of its work", checks.cancelled_stopped
    yield "KV bytes are back where they were, and all native sequences empty", checks.everything_given_back


def _one_line(text: str) -> str:
    return plain(text.replace("\n", "↵ ")).plain
