"""Real models cut into ranges of layers: every logit, and the text, is that of the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hotkv_trio.llama import Vocabulary
from hotkv_trio.llama._facts import read_model_facts
from hotkv_trio.llama._slice import shard_weight_bytes
from tests.real._chain import Outcome, load, run
from tests.real.conftest import GEMMA3, SMOLLM2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.real_model

CHAINS = [
    (SMOLLM2, ((0, 15), (15, 30))),
    (SMOLLM2, ((0, 10), (10, 20), (20, 30))),
    (GEMMA3, ((0, 6), (6, 18))),
    (GEMMA3, ((0, 6), (6, 12), (12, 18))),
]
MIB = 1 << 20


class Wholes:
    """Runs each whole model once for each type of KV."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vocabularies: dict[str, Vocabulary] = {}
        self.outcomes: dict[tuple[str, str], Outcome] = {}

    def vocabulary(self, name: str) -> Vocabulary:
        if name not in self.vocabularies:
            self.vocabularies[name] = Vocabulary(self.folder / name)
        return self.vocabularies[name]

    def outcome(self, name: str, kv: str) -> Outcome:
        if (name, kv) not in self.outcomes:
            vocabulary = self.vocabulary(name)
            self.outcomes[name, kv] = run(self.folder / name, [None], vocabulary, type_k=kv, type_v=kv)
        return self.outcomes[name, kv]


@pytest.fixture(scope="module")
def wholes(models: Path) -> Iterator[Wholes]:
    made = Wholes(models)
    yield made
    for vocabulary in made.vocabularies.values():
        vocabulary.close()


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("name, ranges", CHAINS)
def test_a_chain_of_shards_says_what_the_whole_model_does(
    wholes: Wholes, models: Path, name: str, ranges: tuple[tuple[int, int], ...], kv: str
) -> None:
    expected = wholes.outcome(name, kv)
    outcome = run(models / name, ranges, wholes.vocabulary(name), type_k=kv, type_v=kv)
    assert outcome.equals(expected)
    assert outcome.bytes_per_token == expected.bytes_per_token
    assert len(outcome.logits) == 4 + 16 + 2 + 16
    assert all(len(text) > 20 for text in outcome.texts)


def test_both_taps_give_the_same_bits(wholes: Wholes, models: Path) -> None:
    expected = wholes.outcome(SMOLLM2, "f16")
    for tap in ("native", "python"):
        outcome = run(models / SMOLLM2, ((0, 15), (15, 30)), wholes.vocabulary(SMOLLM2), tap=tap)
        assert outcome.equals(expected)


@pytest.mark.parametrize("name, layers", [(SMOLLM2, (0, 15)), (SMOLLM2, (20, 30)), (GEMMA3, (0, 6)), (GEMMA3, (6, 18))])
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_bytes_are_those_of_the_layers_and_of_llama_cpps_log(
    models: Path, name: str, layers: tuple[int, int], kv: str
) -> None:
    path = models / name
    facts = read_model_facts(path)
    loaded = load(path, layers, n_slots=4, n_ctx=1024, type_k=kv, type_v=kv)
    info = loaded.info
    # All layers of these models are alike.
    assert info.bytes_per_token * facts.n_layer == facts.kv_bytes_per_token(None, kv, kv) * (layers[1] - layers[0])
    assert info.slot_bytes == info.bytes_per_token * info.n_ctx_seq
    # The log has two decimals, of each buffer.
    assert loaded.kv_mib == pytest.approx(4 * info.slot_bytes / MIB, abs=0.011)
    assert loaded.weights_mib == pytest.approx(shard_weight_bytes(path, layers) / MIB, abs=0.0051)
