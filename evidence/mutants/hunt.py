"""Runs what the test suite runs by default against the package that is first on the path; says what found a fault.

Started by ``run.py`` for each planted fault.  Prints one line of JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

# The standard finders are classes.  Those of an editable install would win over the copy that is first on the path.
sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]

from tests.fuzz import test_programs  # noqa: E402
from tests.testing.scenarios import SCENARIOS, sweep, sweep_runtime  # noqa: E402

import hotkv_trio.testing  # noqa: E402
from hotkv_trio.testing import FakeEngine  # noqa: E402


def first_line(exc: BaseException) -> str:
    """Return what a failure says first."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return (str(exc) or repr(exc)).splitlines()[0]


def fuzz() -> dict[str, Any] | None:
    """Run the fuzz tests; count programs until the first that fails."""
    count, found_at, said = 0, 0, ""

    def counted(program: Any) -> Any:
        nonlocal count, found_at, said
        count += not found_at
        try:
            return hotkv_trio.testing.run_program(program)
        except BaseException as exc:
            said, found_at = said or first_line(exc), found_at or count
            raise

    test_programs.run_program = counted
    for test in (
        test_programs.test_contention_for_slots,
        test_programs.test_epochs_that_fence_each_other,
        test_programs.test_engines_that_fail,
        test_programs.test_every_program_under_every_schedule,
        test_programs.test_budgets_that_move,
        test_programs.test_sessions_that_are_moved,
    ):
        try:
            test()
        except BaseException:  # noqa: ASYNC103 - whatever it is, it was found
            if not found_at:
                raise
            return {"found_by": "fuzz", "examples": found_at, "said": said}  # noqa: ASYNC104
    return None


def sweeps() -> dict[str, Any] | None:
    """Run the cancel sweep over the core."""
    for count, name in enumerate(SCENARIOS):
        try:
            sweep(name, lambda: FakeEngine(n_slots=2, n_ctx_seq=16), n_slots=2)
        except BaseException as exc:  # noqa: ASYNC103, BLE001
            return {"found_by": f"cancel sweep of {name}", "examples": count + 1, "said": first_line(exc)}  # noqa: ASYNC104
    try:
        sweep_runtime(lambda: FakeEngine(n_slots=2, n_ctx_seq=16))
    except BaseException as exc:  # noqa: ASYNC103, BLE001
        return {"found_by": "cancel sweep of the runtime", "examples": len(SCENARIOS) + 1, "said": first_line(exc)}  # noqa: ASYNC104
    return None


def main() -> None:
    """Hunt."""
    if not Path(hotkv_trio.__file__).is_relative_to(Path.cwd()):
        raise SystemExit(f"the package under test is not the copy but {hotkv_trio.__file__}")
    logging.disable(logging.CRITICAL)
    start = time.perf_counter()
    found = fuzz() or sweeps() or {"found_by": None, "examples": None, "said": ""}
    print(json.dumps({**found, "seconds": round(time.perf_counter() - start, 1)}))


if __name__ == "__main__":
    main()
