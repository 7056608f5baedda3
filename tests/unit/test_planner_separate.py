"""The planner with engines on ranks of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.plan.trees import Neighbourhoods
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.planner.checks import check_device
from mcore_rl.planner.layouts import with_engines_apart
from mcore_rl.planner.links import plan_moves, traffic_of
from mcore_rl.planner.memory import placement_of, resident_of
from mcore_rl.planner.models import stage_state
from mcore_rl.planner.phases import (
    BUILD,
    CANARY,
    FIRST_SWITCH,
    GRAPHS,
    HAND_OVER,
    LOG_PROBS,
    NCCL,
    ROLLOUT,
    START,
    TRAIN,
    UPDATE,
    Case,
)
from mcore_rl.planner.plan import Outcome, as_json, plan_case
from mcore_rl.planner.report import print_plan
from mcore_rl.planner.search import search
from mcore_rl.planner.settings import GB, MB
from mcore_rl.tools.plan.command_line import read_command_line
from mcore_rl.tools.plan.simulate import with_useful_share
from tests.model_shapes import CONFIGS
from tests.plans import covers_once
from tests.unit.test_planner import LLAMA, case_of, deepseek_v3_case, llama, machine

QWEN = ["--hf-config", str(CONFIGS / "qwen2.5-7b.json"), "--world-size", "16"]


def apart(num_engine_ranks: int = 4, case: Case | None = None, **changes: Any) -> Case:
    """Llama 3.1 8B: TP4 on 4 trainers, and an engine of TP4 on 4 ranks."""
    colocated = case or llama(train=TrainLayout(8, tp_size=4), **changes)
    found = with_engines_apart(colocated, num_engine_ranks)
    assert found is not None
    return found


def parts(outcome: Outcome, phase: str) -> dict[str, int]:
    return dict(outcome.memory.phase(phase).parts)


# --------------------------------------------------------------------------------------- memory


def test_trainers_hold_their_state_and_engines_their_share() -> None:
    case = apart(graph_bytes=GB)
    outcome = plan_case(case)
    state = stage_state(case.actor)[0]
    for phase in (HAND_OVER, TRAIN):
        held = parts(outcome, phase)
        assert {part: held[part] for part in state} == state
        assert not held.keys() & {"rollout weights", "KV cache", GRAPHS}
    for phase in (START, ROLLOUT, UPDATE):
        held = parts(outcome, phase)
        assert not held.keys() & {"weights", "gradients", "optimizer"}
        engine = ("rollout weights", "activations", "KV cache", GRAPHS)
        assert sum(held[part] for part in engine) == case.share_bytes
    assert parts(outcome, UPDATE)["bucket"] == parts(outcome, HAND_OVER)["bucket"] > 0


def test_phases_name_ranks_of_the_world() -> None:
    phases = {phase.name: phase for phase in plan_case(apart()).memory.phases}
    assert {phases[name].rank for name in (START, ROLLOUT, UPDATE)} <= {4, 5, 6, 7}
    assert {phases[name].rank for name in (BUILD, TRAIN, HAND_OVER)} <= {0, 1, 2, 3}


def test_each_side_has_its_own_communicators() -> None:
    outcome = plan_case(apart(machine=machine(communicator_bytes=100 * MB)))
    # TP and the world of the trainers (TP x PP is the same), and the hand-over's.
    assert parts(outcome, TRAIN)[NCCL] == (3 + 1) * 100 * MB
    # Two for the engine's world and two for its TP, and the hand-over's.
    assert parts(outcome, ROLLOUT)[NCCL] == (4 + 1) * 100 * MB


def test_share_without_room_for_a_bucket_does_not_fit() -> None:
    case = apart(gpu_memory_utilization=0.935)  # 74.8 of the 75 GB that are not reserved
    problems = {problem.where: problem for problem in plan_case(case).problems}
    assert problems.keys() == {UPDATE}
    (remedy, *_) = problems[UPDATE].remedies
    assert remedy.lacking_bytes == 0
    assert remedy.flags.startswith("--rl-rollout-gpu-memory-utilization 0.9")


def test_useful_share_is_as_much_as_fits() -> None:
    case, memory = with_useful_share(apart(machine=machine(gpu_bytes=30 * GB)))
    share = case.engine.gpu_memory_utilization
    assert 0.5 < share < 0.9 and not memory.phase(UPDATE).lacking_bytes
    engine = dataclasses.replace(case.engine, gpu_memory_utilization=share + 0.01)
    more = plan_case(dataclasses.replace(case, engine=engine))
    assert more.memory.phase(UPDATE).lacking_bytes


def test_start_is_refused_for_the_side_that_does_not_fit() -> None:
    with pytest.raises(UsageError, match="^phase start .*: rank 4 would hold vLLM's share"):
        check_device(apart(gpu_memory_utilization=0.04))
    with pytest.raises(UsageError, match="^phase build .*: rank 0 would hold weights"):
        check_device(apart(machine=machine(gpu_bytes=12 * GB)))


def test_engines_on_all_ranks_are_planned_as_before() -> None:
    case = llama()
    assert not case.is_separate
    assert UPDATE not in {phase.name for phase in plan_case(case).memory.phases}


# -------------------------------------------------------------------------------------- traffic


def test_each_engine_rank_receives_what_it_needs_and_trainers_nothing() -> None:
    case = apart()
    outcome = plan_case(case)
    received = outcome.traffic.received
    assert received[:4].tolist() == [0] * 4
    np.testing.assert_array_equal(received[4:], resident_of(case))
    np.testing.assert_array_equal(received, outcome.traffic.lower_bound)
    assert outcome.received_over_lower_bound == 1.0
    assert outcome.traffic.sent.sum() == received.sum()  # point to point


@pytest.mark.parametrize(
    "case",
    [
        apart(),
        apart(case=case_of("llama-3.1-8b", TrainLayout(8, 2, 2), RolloutLayout(8, 4, False))),
        apart(case=case_of("qwen3-30b-a3b", TrainLayout(8, 1, 2, 1, 2), RolloutLayout(8, 2, True))),
    ],
    ids=["same_tp", "pipeline", "experts"],
)
def test_engines_needs_are_covered_once_by_what_trainers_hold(case: Case) -> None:
    placement = placement_of(case)
    num_trainers, slots = case.train.world_size, case.rollout.world_size
    near = Neighbourhoods.alike(num_trainers + slots)
    plan = plan_moves(placement, range(slots), near, is_separate=True)
    for slot in range(slots):
        for name, (box,) in placement.needed[placement.slot_class[slot]].items():
            arriving = [
                move.box
                for move in plan.moves
                if move.tensor == name and num_trainers + slot in move.receivers
            ]
            assert covers_once(box, arriving)
    assert all(move.source < num_trainers for move in plan.moves)


def test_engines_on_other_nodes_fetch_shards_once_per_node() -> None:
    """Two nodes of 8: trainers, and two engines of TP4, whose equal ranks forward to each other."""
    case = apart(8, case_of("llama-3.1-8b", TrainLayout(16, 4), RolloutLayout(16, 4, False)))
    placement = placement_of(case)
    traffic = traffic_of(placement, (), case.machine, is_separate=True)
    model = sum(info.num_bytes for info in placement.infos.values())
    assert traffic.received_other_nodes.sum() == model
    assert traffic.received_own_node.sum() == resident_of(case).sum() - model


def test_deepseek_v3_on_separate_ranks() -> None:
    """Half of 512 ranks: as many bytes as an engine rank holds; see the colocated 41.1 GB."""
    colocated = deepseek_v3_case()
    case = dataclasses.replace(
        colocated,
        train=dataclasses.replace(colocated.train, world_size=512),
        rollout=dataclasses.replace(colocated.rollout, world_size=512, rank_map=()),
    )
    found = as_json(plan_case(apart(256, case)))
    assert found["world_size"] == 512
    assert found["received_bytes_max"] == pytest.approx(47.0e9, rel=0.01)
    assert found["received_over_lower_bound"] == 1.0
    assert found["rollout"]["rank_map"] == list(range(256, 512))


# ------------------------------------------------------------------------------- command line


def test_flag_gives_ranks_to_engines() -> None:
    flags = "--tensor-model-parallel-size 4 --rl-rollout-ranks 8-15 --rl-rollout-tp-size 2"
    request = read_command_line([*QWEN, *flags.split()])
    case = request.case
    assert case.engine_ranks == tuple(range(8, 16)) and case.train == TrainLayout(8, 4, etp_size=4)
    assert case.engine.offloaded == frozenset()
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    print_plan(plan_case(case), request.notes, console)
    shown = console.export_text()
    assert "engines have 8 ranks of their own, from 8 to 15" in shown
    assert "off the device during rollout" not in shown


@pytest.mark.parametrize("flag", ["--search", "--simulate"])
def test_other_layouts_are_not_tried_with_given_ranks(flag: str) -> None:
    with pytest.raises(UsageError, match=f"--rl-rollout-ranks 8-15 .*; drop it, or {flag}"):
        read_command_line([*QWEN, "--rl-rollout-ranks", "8-15", flag])


SERVERS = ["--rl-rollout-servers", "http://a:8000,http://b:8000"]


def test_job_with_servers_plans_its_trainers() -> None:
    """All ranks train, and hold what trainers with engines on ranks of their own hold."""
    planned = read_command_line([*QWEN, *SERVERS])
    case = planned.case
    assert case.has_servers and not case.has_engines and case.train.world_size == 16
    assert any("--rl-rollout-ranks" in note for note in planned.notes)
    outcome = plan_case(case)
    assert outcome.traffic is None and outcome.fits
    phases = [phase.name for phase in outcome.memory.phases]
    assert phases == [BUILD, CANARY, FIRST_SWITCH, LOG_PROBS, TRAIN, HAND_OVER]
    beside = read_command_line([*QWEN[:3], "24", "--rl-rollout-ranks", "16-23"]).case
    assert beside.train == case.train
    for name in phases:
        assert parts(outcome, name) == parts(plan_case(beside), name)
    assert as_json(outcome)["rollout"] is None
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    print_plan(outcome, planned.notes, console)
    assert "rollout  servers" in console.export_text()


def test_servers_are_not_simulated() -> None:
    with pytest.raises(UsageError, match="--rl-rollout-servers http.*drop it, or --simulate"):
        read_command_line([*QWEN, *SERVERS, "--simulate"])


def test_layouts_of_the_trainers_of_servers_are_searched() -> None:
    request = read_command_line([*QWEN, *SERVERS])
    found = search(request.case, request.step, top=3)
    assert found.num_fitting and {each.rollout_name for each in found.candidates} == {"none"}
    assert all("rollout" not in each.flags for each in found.candidates)


def test_prompts_of_different_group_sizes_are_planned_with_their_mean(tmp_path: Path) -> None:
    sizes = "a: {path: a.jsonl, weight: 1/4, samples_per_prompt: 24}"
    (tmp_path / "sources.yaml").write_text(f"{sizes}\nb: {{path: b.jsonl, weight: 3/4}}")
    flags = "--rl-num-prompts-per-step 32 --rl-rollout-tp-size 1 --rl-num-samples-per-prompt"
    request, of_one_size = (
        read_command_line([*QWEN, *flags.split(), number, *prompts])
        for number, prompts in (("8", ("--rl-prompts", str(tmp_path / "sources.yaml"))), ("12", ()))
    )
    assert request.case == of_one_size.case and request.step == of_one_size.step
    assert any("planned with 12 samples, the mean of a step" in note for note in request.notes)


def test_split_that_one_side_cannot_use_is_refused_with_the_reason() -> None:
    case = llama(train=LLAMA)
    with pytest.raises(UsageError, match="4"):  # TP4 x PP2 takes 8 ranks
        with_engines_apart(case, 4)
    with pytest.raises(UsageError, match="2"):  # TP4 of the engine
        with_engines_apart(llama(train=TrainLayout(8, 4)), 2)
