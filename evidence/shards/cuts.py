"""Every supported architecture: tiny models cut in two and in three at every valid place.

Each route's every logit is compared with the uncut model's, bit for bit.  The program of calls is that of the tests:
four sessions, prefill of 1, 8, 40 and 300 tokens, decoding together, cutting back and going on.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.llama._route import Shards, same
from tests.llama.test_slice import LONGER

from hotkv_trio._cli._output import spans
from hotkv_trio.llama._architectures import ARCHITECTURES, valid_cuts
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf

F16 = 1


def main() -> int:
    """Print a line for each architecture; exit 1 if a bit differs."""
    differing = 0
    print(f"{'architecture':<16}{'layers':>7}  {'valid cuts':<12}{'routes':>7}  {'logits compared':>16}  equal")
    for arch in sorted(ARCHITECTURES):
        with tempfile.TemporaryDirectory() as folder:
            source = build_tiny_gguf(Path(folder, "m.gguf"), arch, n_layer=LONGER.get(arch, 4))
            with Shards(source, Path(folder), kv_type=F16) as shards:
                expected = shards.run_uncut()
                routes = list(shards.routes(2, 3))
                wrong = [route for route in routes if not same(shards.run(route), expected)]
                cuts = spans(valid_cuts(shards.facts))
                compared = sum(rows.size for rows in expected) * len(routes)
        differing += len(wrong)
        verdict = "yes" if not wrong else f"NO: {wrong}"
        print(
            f"{arch:<16}{shards.facts.n_layer:>7}  {cuts:<12}{len(routes):>7}  {compared:>16,}  {verdict}", flush=True
        )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
