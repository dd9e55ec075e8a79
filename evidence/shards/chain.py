"""A real model whole, and as a chain of shards: the same program of calls, every logit compared, the text of both."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from tests.real._chain import run

from hotkv_trio.llama import Vocabulary


def main() -> int:
    """Run, print; exit 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("cuts", nargs="+", help="where to cut, as 15 or 10,20; each is a chain of its own")
    parser.add_argument("--type", default="f16", help="of keys and values")
    given = parser.parse_args()
    vocabulary = Vocabulary(given.model)
    options = {"type_k": given.type, "type_v": given.type}
    whole = run(given.model, [None], vocabulary, **options)
    n_layer = int(whole.shapes[0].split(":")[1].split(",")[0])
    differing = 0
    print(f"whole: {whole.shapes[0]}, KV {whole.bytes_per_token:,} B a token")
    for text in whole.texts:
        print(f"    {text!r}")
    for cuts in given.cuts:
        ends = [0, *map(int, cuts.split(",")), n_layer]
        chain = run(given.model, list(itertools.pairwise(ends)), vocabulary, **options)
        equal = chain.equals(whole)
        differing += not equal
        print(f"chain: {' + '.join(chain.shapes)}, KV {chain.bytes_per_token:,} B a token")
        print(
            f"    {chain.n_logits:,} logits of {len(chain.logits)} calls equal, bit for bit: {'yes' if equal else 'NO'}"
        )
        print(f"    text equal: {'yes' if chain.texts == whole.texts else 'NO'}")
    vocabulary.close()
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
