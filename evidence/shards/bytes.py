"""What shards take in memory, by our account and by llama.cpp's own log: KV of four slots of 1,024 tokens, and weights.

The log has two decimals of a MiB.  It gives the weights as the mapped part of the file; copies that llama.cpp packs
otherwise for the processor come on top, and are not counted here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.real._chain import load

from hotkv_trio.llama._facts import read_model_facts
from hotkv_trio.llama._slice import shard_weight_bytes

MIB = 1 << 20
ROUNDING = 0.011


def main() -> int:
    """Print; exit 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("layers", nargs="+", help="first:end, as 0:15")
    given = parser.parse_args()
    facts = read_model_facts(given.model)
    wrong = 0
    print(
        f"{given.model.name}: {facts.n_layer} layers\n{'layers':<8}{'KV':>6}{'B a token':>11}{'share':>10}"
        f"{'KV, B':>13}{'MiB':>9}{'in the log':>12}{'weights, B':>14}{'MiB':>9}{'in the log':>12}"
    )
    for kv in ("f16", "q8_0"):
        whole = facts.kv_bytes_per_token(None, kv, kv)
        for layers in (None, *(tuple(map(int, text.split(":"))) for text in given.layers)):
            loaded = load(given.model, layers, n_slots=4, n_ctx=1024, type_k=kv, type_v=kv)
            info, weights = loaded.info, shard_weight_bytes(given.model, layers)
            first, end = info.layers
            kv_bytes = info.slot_bytes * info.n_slots
            exact = info.bytes_per_token * facts.n_layer == whole * (end - first)
            near = abs(loaded.kv_mib - kv_bytes / MIB) < ROUNDING and abs(loaded.weights_mib - weights / MIB) < ROUNDING
            wrong += not (exact and near)
            print(
                f"{f'{first}:{end}':<8}{kv:>6}{info.bytes_per_token:>11,}{f'{end - first}/{facts.n_layer}':>10}"
                f"{kv_bytes:>13,}{kv_bytes / MIB:>9.2f}{loaded.kv_mib:>12.2f}"
                f"{weights:>14,}{weights / MIB:>9.2f}{loaded.weights_mib:>12.2f}{'' if exact and near else '  NO'}"
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
