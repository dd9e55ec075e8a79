"""Public reports against systems that do this job: who reported it, and what ours must show.

Each is a *kind* of fault.  The test of it cites the report in its docstring, by the name given here.
"""

from __future__ import annotations

from typing import Final

REPORTS: Final[dict[str, tuple[str, ...]]] = {
    "a fresh slot is as a fresh context": ("llama.cpp #27148", "llama.cpp #27422"),
    "no answer carries another session's content": ("LMCache #4385", "mlx-lm #965", "llama.cpp #10072"),
    "neighbours in a batch change nothing": ("llama.cpp #24962",),
    "a full session ends nobody else": ("llama.cpp #23652", "lemonade #3276"),
    "no KV slot is a typed error": ("ollama #10127",),
    "cancelling queued work leaves the running alone": ("ik_llama #1929",),
    "work of a client who left is not run": ("llama.cpp #13262", "llama.cpp #24496"),
    "an abort while queued leaves the session usable": ("sglang #31765",),
    "a cancel leaks neither lock nor memory": ("sglang #22273", "sglang #22790", "petals #163"),
    "churn ends, in exact zeros, without spinning": ("petals #396", "petals #487", "LMCache #2942"),
    "each waiter's deadline is its own": ("petals #434",),
    "waiters are served in strict order": ("petals #53",),
    "a closing runtime leaves nothing behind": ("petals #154",),
    "no path knows of slot 0 alone": ("mesh-llm #1551",),
    "no slot is lent while a call that names it runs": ("mesh-llm #1150",),
    "a removal that fails loses no slot": ("mesh-llm #581",),
    "a disconnect takes that session only": ("mesh-llm #1523", "llama.cpp #7378"),
    "every entry point asks whether the session can be used": ("mesh-llm #1853",),
    "an append begins at the length": ("mesh-llm #1544",),
    "queued work of a superseded owner does not run": ("mesh-llm #1570",),
    "the length changes after a native success only": ("mesh-llm #1514",),
    "no call takes an id without its epoch": ("LMCache #2878", "LMCache #4825", "LMCache #3770"),
    "an abort is cleaned up at once": ("LMCache #5006",),
    "releasing twice changes nothing": ("LMCache #5095",),
    "shards that evict differently do not disagree": ("LMCache #1467", "exo #1341"),
    "eviction between look-up and use": ("LMCache #4133",),
    "work refreshes the TTL": ("LMCache #4091",),
    "a refused rollback is not ignored": ("llama.cpp PR 28007", "llama.cpp #23206", "llama-cpp-python #2140"),
    "a sliding window lives through many turns": ("llama-cpp-python PR 2180", "llama.rn #396"),
    "quantised keys live through many turns": ("llama.cpp #9383", "llama.cpp #7230"),
    "a prompt longer than a batch is cut into chunks": ("node-llama-cpp #129",),
    "all slots ask for outputs at once": ("llama.cpp #24967",),
    "sizes and ids out of range are refused": (
        "llama.cpp #24098",
        "llama.cpp #16432",
        "llama-cpp-python #2045",
        "llama-cpp-python #2051",
    ),
    "one thread calls llama.cpp": ("llama-cpp-python #471", "llama-cpp-python #1367", "llama-cpp-python #1995"),
    "values that are not finite poison nobody": ("vllm PR 50283",),
    "a retry writes no row twice": ("omlx PR 3414",),
    "a replay under a new epoch is the unbroken run": ("petals #587",),
    "nothing is shared between sessions": ("vllm CVE-2025-46570",),
    "who is evicted, and in what order": ("llama-server test_router",),
    "removing one slot leaves another's state as it was": ("llama.cpp test-save-load-state",),
}
