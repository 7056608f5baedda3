"""A start that exceeds host memory is refused; one that may exceed it causes a warning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.common.machine import MachineMemory
from mcore_rl.common.platform import WITHOUT_CUDA
from mcore_rl.job.facts import Source
from mcore_rl.job.resolver import resolve
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.model.roles import CRITIC
from mcore_rl.planner.checks import check_host
from mcore_rl.planner.host import PROCESS_BYTES, SAVE, HostPhase, host_phases, received_of
from mcore_rl.planner.memory import memory_of, resident_of
from mcore_rl.planner.models import optimizer_bytes, stage_state
from mcore_rl.planner.phases import BUILD, FIRST_SWITCH, RESUME, START, TRAIN, Case
from mcore_rl.planner.settings import GB
from tests.unit.test_planner import MACHINE, case_of

KV_CACHE = 2 * GB


def qwen(dp_size: int = 1, **changes: Any) -> Case:
    """Qwen3-0.6B on `dp_size` ranks of one machine."""
    rollout = RolloutLayout(dp_size, 1, False)
    machine = dataclasses.replace(MACHINE, ranks_per_node=8)
    case = case_of("qwen3-0.6b", TrainLayout(dp_size), rollout, machine, **changes)
    training = dataclasses.replace(case.training, saved_in_pieces=True)
    return dataclasses.replace(case, training=training)


def phases_of(case: Case, *, widens: bool = False) -> dict[str, HostPhase]:
    found = host_phases(case, kv_cache_bytes=KV_CACHE, widens=widens)
    return {phase.name: phase for phase in found}


def checked(case: Case, *, limit: int, available: int, on_gpus: bool = False) -> tuple[str, ...]:
    memory = memory_of(case, resident_of(case)) if on_gpus else None
    machine = MachineMemory(limit, available, "the machine's memory")
    return check_host(case, machine, memory=memory, kv_cache_bytes=KV_CACHE, widens=False)


def test_node_holds_models_and_engines_of_all_ranks() -> None:
    found = phases_of(qwen(4))
    state = stage_state(qwen(4).actor)[0]
    for name in (TRAIN, SAVE):
        assert {part: found[name].parts[part] for part in state} == {
            part: 4 * size for part, size in state.items()
        }
        assert found[name].parts["KV cache"] == 4 * KV_CACHE
        assert found[name].exact_bytes < found[name].total_bytes
    assert "KV cache" not in found[BUILD].parts
    moments = qwen(4).training.moment_bytes
    assert found[TRAIN].parts["optimizer"] - found[BUILD].parts["optimizer"] > moments
    assert RESUME in phases_of(qwen(loads_checkpoint=True))


def test_save_in_the_background_holds_a_copy_of_what_a_rank_saves() -> None:
    """On hosts without GPUs, and with them."""
    case = qwen(2, saves_checkpoints=True)
    training = dataclasses.replace(case.training, saves_in_background=True)
    in_background = dataclasses.replace(case, training=training)
    (state,), (optimizer,) = stage_state(case.actor), optimizer_bytes(case.actor)
    copy = state["weights"] + optimizer
    assert copy < phases_of(in_background)[SAVE].parts["copies"] / 2 < copy + GB // 2
    assert phases_of(case)[SAVE].parts["copies"] / 2 < copy / 4
    # The next step begins while it is written.
    assert phases_of(in_background)[TRAIN].parts["copies"] > 2 * copy
    assert "copies" not in phases_of(case)[TRAIN].parts
    host = memory_of(in_background, resident_of(case)).host_bytes["checkpoint being written"]
    assert host == phases_of(in_background)[SAVE].parts["copies"]


def test_cpu_without_16_bit_products_holds_widened_weights() -> None:
    case = qwen(2)
    found = {name: phase.parts for name, phase in phases_of(case, widens=True).items()}
    layer = 1024 * (16 + 8 + 8 + 16) * 128 + 3 * 1024 * 3072  # attention, feed-forward
    assert found[TRAIN]["widened weights"] == 2 * 4 * (28 * layer + 151936 * 1024)
    assert "widened weights" not in found[START]  # nothing was multiplied yet
    assert "gradients" not in found[START]
    assert "widened weights" not in phases_of(case)[TRAIN].parts


def test_first_switch_holds_bucket_or_widened_weights_of_canary() -> None:
    large = {"bucket_bytes": 1 << 40}
    replicas = phases_of(qwen(2, **large))  # each has all that it needs
    assert "bucket" not in replicas[FIRST_SWITCH].parts
    train, rollout = TrainLayout(2, pp_size=2), RolloutLayout(2, 1, False)
    stages = case_of("qwen3-0.6b", train, rollout, MACHINE, **large)
    received = int(received_of(stages).sum())
    assert 0 < received < sum(resident_of(stages))
    assert phases_of(stages)[FIRST_SWITCH].parts["bucket"] == received
    widened = phases_of(stages, widens=True)[FIRST_SWITCH].parts
    assert "widened weights" in widened and "bucket" not in widened
    resumed = case_of("qwen3-0.6b", train, rollout, MACHINE, loads_checkpoint=True, **large)
    assert phases_of(resumed, widens=True)[FIRST_SWITCH].parts["bucket"] == received


@pytest.mark.parametrize("ranks", [(2, 3), (0, 1), (0, 3)])
def test_critic_on_own_ranks_is_counted_beside_actor(ranks: tuple[int, ...]) -> None:
    case = qwen(2)
    critic = dataclasses.replace(case.actor, name=CRITIC, ranks=ranks)
    phase = phases_of(dataclasses.replace(case, critic=critic))[TRAIN]
    weights = stage_state(case.actor)[0]["weights"]
    assert phase.parts["weights"] == phase.parts[critic.part_name("weights")] == 2 * weights
    assert phase.parts["KV cache"] == 2 * KV_CACHE
    assert phase.parts["processes"] == 4 * PROCESS_BYTES


def test_copies_of_save_do_not_grow_with_data_parallel_ranks() -> None:
    copies = [phases_of(qwen(size))[SAVE].parts["copies"] // size for size in (1, 2, 8)]
    assert len(set(copies)) == 1 and copies[0] < GB < min(optimizer_bytes(qwen().actor))


def test_host_memory_too_small_is_refused_with_figures_and_remedy() -> None:
    case = qwen(2)
    fullest = max(phases_of(case).values(), key=lambda phase: phase.total_bytes)
    total, exact = fullest.total_bytes, fullest.exact_bytes
    assert not checked(case, limit=2 * total, available=2 * total)
    (line,) = checked(case, limit=exact, available=exact)
    assert f"phase {fullest.name}" in line and "estimate" in line
    (line,) = checked(case, limit=2 * total, available=GB)
    assert "free now" in line
    with pytest.raises(UsageError, match=f"phase {fullest.name} does not fit") as refused:
        checked(case, limit=exact - 1, available=0)
    assert "optimizer " in str(refused.value)
    assert "--rl-rollout-kv-cache-gib" in refused.value.remedy


def test_offloaded_state_is_checked_against_host_memory() -> None:
    case = qwen(2, offloaded=frozenset({"optimizer", "parameters"}), saves_checkpoints=True)
    state = stage_state(case.actor)[0]
    offloaded = 2 * (state["optimizer"] + state["weights"])
    assert not checked(case, limit=1000 * GB, available=1000 * GB, on_gpus=True)
    with pytest.raises(UsageError) as refused:
        checked(case, limit=offloaded - 1, available=0, on_gpus=True)
    assert "--rl-offload" in refused.value.remedy
    # What is not exact refuses nobody.
    assert checked(case, limit=offloaded, available=offloaded, on_gpus=True)


def test_command_line_is_checked_against_memory_of_machine(
    checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    tokens = [
        *("--rl-hf-checkpoint", str(checkpoint_factory()), "--rl-prompts", "prompts.jsonl"),
        *("--rl-reward", "length", "--rl-run-dir", str(tmp_path)),
        *("--rl-max-prompt-tokens", "8", "--rl-max-response-tokens", "8"),
        *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "4"),
        *("--rl-rollout-kv-cache-gib", "3"),
    ]

    def notes(limit: int, available: int) -> str:
        machine = MachineMemory(limit, available, "the machine's memory")
        spec = resolve(Source(tokens=tokens, platform=WITHOUT_CUDA, host_memory=lambda: machine))
        return "\n".join(spec.notes)

    assert "host memory" not in notes(100 * GB, 100 * GB)
    assert "free now" in notes(100 * GB, GB)
    with pytest.raises(UsageError, match="KV cache 3.22 GB"):
        notes(3 * GB, 3 * GB)
