"""Megatron's flags that end a run early: all is saved, and the same command goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.trainer.resume import folders
from tests.e2e.recipe import task_flags
from tests.rank_pool import ROOT, RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = (
    *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"),
    *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "4"),
    *("--rl-eval-interval", "0", "--rl-max-response-tokens", "8", "--rl-num-steps", "9"),
)
HOOKS = ROOT / "tests" / "e2e"
SIGNAL = ("--exit-signal-handler", "--rl-import", str(HOOKS / "signal_at_step.py"))
MINUTES = ("--exit-duration-in-mins", "2", "--rl-import", str(HOOKS / "started_long_ago.py"))


def test_signal_interval_and_duration_save_and_end_with_code_0(
    tmp_path: Path, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    checkpoints = str(tmp_path / "run" / "checkpoints")
    load = ("--load", checkpoints, "--rl-load-or-start", "--save-retain-interval", "4")
    for more, reason, kept in (
        (SIGNAL, "SIGTERM, by --exit-signal-handler", [2]),
        (("--exit-interval", "4"), "--exit-interval 4", [4]),
        (MINUTES, "--exit-duration-in-mins 2", [5, 4]),
    ):
        flags = task_flags(checkpoint_factory(), tmp_path / "run", *SMALL, *load, *more)
        outcomes = ranks.run_raw("tests.e2e.jobs:train", world_size=2, tokens=flags)
        said = "".join(outcome.output for outcome in outcomes)
        assert {outcome.exit_code for outcome in outcomes} == {0}, said[-6000:]
        assert said.count(f"[Exit] stopped after step {kept[0] - 1} by {reason}; resume with") == 1
        assert folders.complete_steps(tmp_path / "run" / "checkpoints") == kept
        assert "Traceback" not in said

    # Without --load it would fall behind what lies there, which --load would take the next time.
    flags = task_flags(checkpoint_factory(), tmp_path / "run", *SMALL)
    outcomes = ranks.run_raw("tests.e2e.jobs:train", world_size=2, tokens=flags)
    assert {outcome.exit_code for outcome in outcomes} == {2}
    refusal = f"--save {tmp_path / 'run' / 'checkpoints'} has a checkpoint of step 5, and this run "
    assert refusal + "begins at step 0" in outcomes[0].output
    assert folders.complete_steps(tmp_path / "run" / "checkpoints") == [5, 4]
