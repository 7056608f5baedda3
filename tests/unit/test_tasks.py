"""Commands that srun or mpirun starts several times: one run or an error, never several runs."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from typing import NoReturn

import pytest

from mcore_rl.common.agreement import report
from mcore_rl.common.errors import UsageError
from mcore_rl.job.environment import (
    bound_product_caches,
    check_devices,
    check_num_tasks,
    open_store,
)

NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_STEP_NUM_TASKS", "PMI_SIZE"),
)
COMPLETE = {
    **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_with(error: UsageError) -> NoReturn:
        raise error

    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("mcore_rl.job.environment.leave_with", leave_with)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_several_tasks_without_ranks_are_refused(name, monkeypatch):
    monkeypatch.setenv(name, "2")
    with pytest.raises(UsageError) as caught:
        open_store()
    assert caught.value.flag == f"{name} 2"
    assert "mcore_rl.launch" in caught.value.remedy and name in caught.value.remedy


@pytest.mark.parametrize("count", ["1", "", "many"])
def test_one_task_is_a_run_of_one_process(count, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", count)
    monkeypatch.setenv("SLURM_NTASKS", "8")  # of the allocation
    assert open_store() is None


@pytest.mark.parametrize(
    ("given", "lacks"),
    [
        ({"RANK": "0"}, "WORLD_SIZE and MASTER_ADDR and MASTER_PORT and LOCAL_RANK"),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK and LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a"}, "MASTER_PORT and LOCAL_RANK"),
        ({k: v for k, v in COMPLETE.items() if k != "LOCAL_RANK"}, "LOCAL_RANK"),
    ],
)
def test_incomplete_variables_of_a_launcher_are_refused(given, lacks, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"lacks {lacks}$|lacks {lacks};"):
        open_store()


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"RANK": "first"}, "RANK 'first'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT 'http'"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK '-1'"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE '0'"),
        ({"LOCAL_WORLD_SIZE": "1.5"}, "LOCAL_WORLD_SIZE '1.5'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT '65536'"),
        ({"WORLD_SIZE": "1" + "0" * 12}, "WORLD_SIZE '1000000000000'"),
        ({"RANK": "9" * 5000}, f"RANK '{'9' * 20}'"),
        ({"MASTER_ADDR": "[::1]"}, "MASTER_ADDR '[::1]'"),
        ({"MASTER_ADDR": "127.0.0.1:29500"}, "MASTER_ADDR '127.0.0.1:29500'"),
        ({"MASTER_ADDR": "tcp://10.0.0.1"}, "MASTER_ADDR 'tcp://10.0.0.1'"),
        ({"MASTER_ADDR": "node 1"}, "MASTER_ADDR 'node 1'"),
        ({"RANK": "2"}, "RANK 2"),
        ({"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS 8"),
        ({"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS 2"),
        # `srun -n 2 torchrun --nproc-per-node 2` would be two runs.
        ({"GROUP_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS 2"),
        (
            {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_STEP_NUM_TASKS 2",
        ),
    ],
)
def test_inconsistent_ranks_are_refused(given, flag, monkeypatch):
    for name, value in (COMPLETE | given).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        open_store()
    assert caught.value.flag == flag and caught.value.remedy


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "fe80::1%eth0", "node-1.cluster", "n_1"])
def test_address_of_a_machine_is_accepted(address, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")  # checked after the address
    for name, value in (COMPLETE | {"MASTER_ADDR": address}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="SLURM_STEP_NUM_TASKS 8 says"):
        open_store()


@pytest.mark.slow
def test_port_in_use_is_one_sentence():
    """In another process, because the patch of stores on loopback stays applied."""
    script = "from mcore_rl.job.environment import open_store; open_store()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | COMPLETE | {"WORLD_SIZE": "1", "MASTER_PORT": port},
            capture_output=True,
            text=True,
        )
    sentence = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"MASTER_ADDR 127.0.0.1, port {port}," in sentence and "EADDRINUSE" in sentence


@pytest.mark.parametrize("value", ["", " "])
def test_blank_variables_count_as_unset(value, monkeypatch):
    """Megatron would read numbers from them."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, value)
    assert open_store() is None
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"} & os.environ.keys()


@pytest.mark.parametrize(("name", "value"), [("LOCAL_RANK", "first"), ("LOCAL_WORLD_SIZE", "0")])
def test_local_variables_without_ranks_must_be_numbers(name, value, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.1:2222")  # of a service, not read
    assert open_store() is None
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name} '{value}' is not a number from"):
        open_store()


@pytest.mark.parametrize(
    ("rank", "level"),
    [("0", logging.DEBUG), ("", logging.DEBUG), ("1", logging.WARNING), ("x", logging.WARNING)],
)
def test_loggers_are_set_up_before_ranks_are_checked(rank, level):
    """A RANK that is not a number must not end in a traceback. In another process."""
    script = (
        "import logging; from mcore_rl.common.run_output import setup_logging\n"
        "setup_logging(); print(logging.getLogger('mcore_rl').level)"
    )
    environment = os.environ | {"RANK": rank}
    output = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
    assert output == f"{level}\n"


@pytest.mark.parametrize(("rank", "is_shown"), [("", True), ("x", True), ("1", False), ("2", True)])
def test_rank_outside_the_world_reports_its_mistake(rank, is_shown, monkeypatch, capfd):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    report("a mistake")
    assert ("a mistake" in capfd.readouterr().err) == is_shown


def test_one_launcher_per_node_is_accepted(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    check_num_tasks(2)
    with pytest.raises(UsageError):
        check_num_tasks(1)


@pytest.mark.parametrize(
    ("visible", "local_rank", "ranks_per_node", "rollout_tp_size", "flag"),
    [
        (8, 7, 8, 8, None),
        (8, 0, 2, 2, None),
        # `srun --gpus-per-task=1`: each process numbers its only GPU 0.
        (1, 0, 8, 1, None),
        (1, 1, 8, 1, "LOCAL_RANK 1"),
        (1, 0, 8, 2, "--rl-rollout-tp-size 2"),
        (1, 1, 8, 2, "LOCAL_RANK 1"),
        (4, 3, 8, 2, "--rl-rollout-tp-size 2"),
        (1, 0, 1, 2, None),  # machines with one GPU
    ],
)
def test_each_rank_must_see_the_gpus_that_it_and_vllm_use(
    visible, local_rank, ranks_per_node, rollout_tp_size, flag
):
    def check() -> None:
        check_devices(
            visible,
            local_rank=local_rank,
            ranks_per_node=ranks_per_node,
            rollout_tp_size=rollout_tp_size,
        )

    if flag is None:
        check()
        return
    with pytest.raises(UsageError, match=f"^{flag} ") as caught:
        check()
    assert "--gpus-per-node" in caught.value.remedy


def test_caches_of_products_are_bounded_unless_they_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    bound_product_caches()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "128"
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
