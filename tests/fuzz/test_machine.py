"""The long-lived API under Hypothesis's rule-based machine."""

from __future__ import annotations

import logging

from hypothesis import HealthCheck, Phase, settings

from hotkv_trio.testing.machine import RuntimeMachine

logging.getLogger("hotkv_trio").addFilter(lambda record: "as told" not in record.getMessage())

TestRuntimeMachine = RuntimeMachine.TestCase
TestRuntimeMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
