"""Two launchers, as on two machines: a run that loses one of them resumes bit for bit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.recipe import HOOKS, task_flags
from tests.e2e.test_resume import COMMON, KILLED_AFTER, NUM_STEPS, SAVED_AT, Run, run
from tests.rank_pool import ENVIRONMENT, ROOT, RankPool, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = ROOT / "scripts" / "run_deepseek_moe.sh"
FLAGS = (*COMMON, "--rl-kl-coef", "0.05")
# Of the whole job: two machines of two processes each, a pipeline stage and an engine on each.
RANKS_PER_NODE = ("--rl-ranks-per-node", "2")


@dataclass(frozen=True)
class Nodes:
    """How the launchers of both machines have ended, and what they have said."""

    exit_codes: list[int]
    said: list[str]


def start(
    checkpoint: Path,
    folder: Path,
    *flags: str,
    ranks_per_node: int = 2,
    environment: Mapping[str, str],
    **of_node: Any,
) -> Nodes:
    """`scripts/run_deepseek_moe.sh` on each machine, with `folder` shared by both.

    `of_node` are the flags that only node0 or node1 gets.
    """
    given = {**os.environ, **ENVIRONMENT, **environment}
    for name in ("GLOO_SOCKET_IFNAME", "VLLM_HOST_IP"):
        given.pop(name, None)
    given |= {
        "NNODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "MCORE_RL_SKIP_SETUP": "1",
    }
    processes = []
    for node in range(2):
        tokens = [*task_flags(checkpoint, folder, *FLAGS, *flags), *of_node.get(f"node{node}", ())]
        at = tokens.index("--rl-run-dir")
        if not folder.is_dir():
            del tokens[at : at + 2]  # each machine's script makes up a name of its own
        processes.append(
            subprocess.Popen(
                ["bash", str(SCRIPT), "--nproc", str(ranks_per_node), *tokens],
                cwd=folder.parent,
                env={**given, "NODE_RANK": str(node)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=500)[0] for process in processes]
    return Nodes([process.returncode for process in processes], said)


@pytest.fixture(scope="module")
def runs(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path_factory: Any
) -> tuple[Run, Nodes, Nodes, Run]:
    """Undisturbed, of one launcher's ranks; both machines, of which one is lost; and continuing."""
    folder = tmp_path_factory.mktemp("nodes")
    whole = run(ranks, warmed_checkpoint, folder / "whole", 4, " ".join((*FLAGS, *RANKS_PER_NODE)))
    hook = {
        "MCORE_RL_TEST_END_AT_STEP": str(KILLED_AFTER),
        "MCORE_RL_TEST_END_LAUNCHER_OF": "2",  # on node 1
    }
    kill = ("--rl-import", str(HOOKS / "end_at_step.py"))
    lost = start(warmed_checkpoint, folder / "none", *kill, environment=hook)
    (made,) = (folder / "runs").iterdir()
    again = ("--load", str(made / "checkpoints"), "--rl-export-hf", str(made / "exported"))
    forked = {"PYTHON_EXEC": str(ranks.python.program)}
    resumed = start(warmed_checkpoint, made, *again, environment=forked)
    return whole, lost, resumed, Run(made, resumed.said[0], starts=[])


def test_the_other_machine_ends_with_a_sentence(runs: tuple[Run, Nodes, Nodes, Run]) -> None:
    """Its ranks would wait for ten minutes, for partners that are dead."""
    _, lost, _, _ = runs
    assert lost.exit_codes == [1, -signal.SIGKILL], lost.said
    assert lost.said[0].splitlines()[-1] == (
        f"mcore_rl: error: the launcher of node 1 ({socket.gethostname()}) is gone, or its machine "
        "is: all processes here have ended, too"
    )


def test_both_agree_on_one_run_directory_and_go_on_bit_for_bit(
    runs: tuple[Run, Nodes, Nodes, Run],
) -> None:
    whole, _, resumed, run_again = runs
    assert resumed.exit_codes == [0, 0], resumed.said
    assert f"[Resume] resuming from step {SAVED_AT}" in resumed.said[0]
    assert f"step {NUM_STEPS - 1} ({NUM_STEPS}/{NUM_STEPS})" in resumed.said[0]
    assert "step " not in resumed.said[1]  # it is told once
    assert whole.metrics.keys() == run_again.metrics.keys() >= set(range(NUM_STEPS))
    for step, metrics in whole.metrics.items():
        other = run_again.metrics[step]
        differing = {n: (v, other.get(n)) for n, v in metrics.items() if other.get(n) != v}
        assert not differing, (step, differing)
    assert whole.weights == run_again.weights and whole.weights


def test_flags_that_differ_are_one_sentence_on_each_machine(
    warmed_checkpoint: Path, warm_python: Path, tmp_path: Path
) -> None:
    """test_slurm.py has a mistake that both machines find."""
    pipeline = ("--tensor-model-parallel-size", "1", "--expert-model-parallel-size", "1")
    of_one: dict[str, Any] = {"ranks_per_node": 1, "node1": ("--lr", "2e-4")}
    of_one["environment"] = {"PYTHON_EXEC": str(warm_python)}
    nodes = start(warmed_checkpoint, tmp_path / "none", *pipeline, **of_one)
    assert nodes.exit_codes == [2, 2], nodes.said
    sentence = (
        f"on rank 1 (host {socket.gethostname()}): --lr is 0.0002 here and 0.0001 on rank 0; "
    )
    for said in nodes.said:
        (line,) = [line for line in said.splitlines() if "mcore_rl: error" in line]
        assert line.startswith(f"mcore_rl: error: {sentence}") and "Traceback" not in said
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))
