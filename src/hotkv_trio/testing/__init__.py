"""Tools for testing what embeds hotkv-trio, and hotkv-trio itself.  Nothing in the package imports this."""

from hotkv_trio._owner import InlineExecutor as InlineExecutor
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf as build_tiny_gguf
from hotkv_trio.testing._cancel_sweep import CancelPoint as CancelPoint
from hotkv_trio.testing._cancel_sweep import CancelSweep as CancelSweep
from hotkv_trio.testing._cancel_sweep import Victim as Victim
from hotkv_trio.testing._cancel_sweep import cancel_at_every_step as cancel_at_every_step
from hotkv_trio.testing._engine_contract import EngineContract as EngineContract
from hotkv_trio.testing._fake_engine import FakeEngine as FakeEngine
from hotkv_trio.testing._replay_oracle import ReplayOracle as ReplayOracle
from hotkv_trio.testing._run_program import Oracle as Oracle
from hotkv_trio.testing._run_program import ProgramFailed as ProgramFailed
from hotkv_trio.testing._run_program import ProgramRun as ProgramRun
from hotkv_trio.testing._run_program import run_program as run_program
from hotkv_trio.testing._schedule_tape import Hung as Hung
from hotkv_trio.testing._schedule_tape import ScheduleTape as ScheduleTape
from hotkv_trio.testing._step_invariants import StepInvariants as StepInvariants
from hotkv_trio.testing._step_invariants import Violation as Violation
from hotkv_trio.testing.programs import Program as Program
