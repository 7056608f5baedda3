"""Megatron's flags that end a run early: it is saved, and the same command resumes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.trainer.resume import folders
from tests.e2e.recipe import HOOKS, SMALL, run_job, task_flags
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIGNAL = ("--exit-signal-handler", "--rl-import", str(HOOKS / "signal_at_step.py"))
MINUTES = ("--exit-duration-in-mins", "2", "--rl-import", str(HOOKS / "started_long_ago.py"))


def test_signal_interval_and_duration_save_and_end_with_code_0(
    tmp_path: Path, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    job = (checkpoint_factory(), tmp_path / "run", *SMALL, "--rl-num-steps", "9")
    load = ("--load", str(checkpoints), "--rl-load-or-start", "--save-retain-interval", "4")
    for more, reason, kept in (
        (SIGNAL, "SIGTERM, by --exit-signal-handler", [2]),
        (("--exit-interval", "4"), "--exit-interval 4", [4]),
        (MINUTES, "--exit-duration-in-mins 2", [5, 4]),
    ):
        ended = run_job(ranks, task_flags(*job, *load, *more))
        ended.require(0)
        line = f"[Exit] stopped after step {kept[0] - 1} by {reason}; resume with"
        assert ended.said.count(line) == 1 and "Traceback" not in ended.said
        assert folders.complete_steps(checkpoints) == kept

    # Without --load it would fall behind what lies there, which --load would take the next time.
    ended = run_job(ranks, task_flags(*job))
    ended.require(2)
    refusal = f"--save {checkpoints} has a checkpoint of step 5, and this run "
    assert refusal + "begins at step 0" in ended.ranks[0].output
    assert folders.complete_steps(checkpoints) == [5, 4]
