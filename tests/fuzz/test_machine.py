"""The long-lived API under Hypothesis's rule-based machine."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

from hotkv_trio.testing.machine import RuntimeMachine

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
