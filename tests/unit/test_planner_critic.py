"""A critic in a plan: its memory in every phase, its own layout, and the advice about it."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import parameters_of
from mcore_rl.config import CriticOptions
from mcore_rl.model.layout import RolloutLayout, TrainLayout, pipeline_layers
from mcore_rl.model.roles import CRITIC, DEGREE_FLAGS
from mcore_rl.planner.activations import (
    head_bytes,
    log_prob_activation_bytes,
    train_activation_bytes,
)
from mcore_rl.planner.advice import CRITIC_FLAGS
from mcore_rl.planner.layouts import following, in_layout
from mcore_rl.planner.memory import memory_of
from mcore_rl.planner.models import stage_state
from mcore_rl.planner.phases import (
    BUILD,
    BUILD_CRITIC,
    CANARY,
    FIRST_SWITCH,
    HAND_OVER,
    LOG_PROBS,
    ROLLOUT,
    START,
    TRAIN,
    TRAIN_CRITIC,
    VALUES,
    Case,
)
from mcore_rl.planner.plan import Outcome, as_json, plan_case
from mcore_rl.planner.report import print_plan
from mcore_rl.planner.search import search
from mcore_rl.planner.settings import GB
from mcore_rl.tools.plan.command_line import PlanRequest, read_command_line
from tests.model_shapes import CONFIGS
from tests.unit.test_planner import DEEP, LONG, STEP, assert_remedies_help, case_of
from tests.unit.test_planner import llama as llama_of

QWEN = ["--hf-config", str(CONFIGS / "qwen3-30b-a3b.json"), "--world-size", "16"]
LAYOUT = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
LAYOUT += "--expert-model-parallel-size 4"
OWN = "--rl-critic-tp-size 2 --rl-critic-pp-size 1 --rl-critic-ep-size 8"


def request_of(*flags: str, algorithm: str = "ppo") -> PlanRequest:
    return read_command_line(
        [*QWEN, *LAYOUT.split(), "--rl-algorithm", algorithm, *" ".join(flags).split()]
    )


def with_critic(case: Case, **changes: Any) -> Case:
    """`case` with a critic that follows its actor except for `changes`."""
    shape = dataclasses.replace(case.shape, value_head=True, tied_embeddings=False)
    critic = dataclasses.replace(case.actor, name=CRITIC, shape=shape)
    return dataclasses.replace(case, critic=dataclasses.replace(critic, **changes))


def llama(**changes: Any) -> Case:
    return llama_of(train=DEEP, tp_size=2, **changes)


# ----------------------------------------------------------------------------------- from the flags


def test_only_algorithm_with_critic_plans_critic() -> None:
    assert request_of(algorithm="grpo").case.critic is None
    assert request_of("--rl-advantage gae", algorithm="grpo").case.critic is not None


def test_critic_follows_actor_except_for_own_flags() -> None:
    case = request_of().case
    critic = case.critic
    assert critic is not None and critic.name == CRITIC
    assert critic.train == case.train and critic.layers == case.layers
    assert critic.shape.value_head and not critic.shape.tied_embeddings
    assert critic.training == case.training and critic.own_degrees == frozenset()
    case = request_of(OWN).case
    critic = case.critic
    assert critic is not None
    assert (critic.train.tp_size, critic.train.pp_size, critic.train.ep_size) == (2, 1, 8)
    assert critic.own_degrees == {"tp_size", "pp_size", "ep_size"}
    assert (case.train.tp_size, case.train.pp_size, case.train.ep_size) == (4, 2, 4)
    # The samples of a mini-batch are shared out over its own data-parallel ranks.
    assert critic.training.num_micro_batches * 4 == case.training.num_micro_batches


def test_critic_flags_are_flags_of_run() -> None:
    """tests/dist compares the planned critic with one that was built."""
    flags = {parameter.field: parameter.flag for parameter in parameters_of(CriticOptions)}
    for degree, flag in CRITIC_FLAGS.items():
        assert flag == flags[degree] == f"--rl-critic-{degree.replace('_', '-')}"
        assert degree in DEGREE_FLAGS


def test_critic_ranks_are_taken_from_actor() -> None:
    flags = ("--rl-critic-ranks 8-15", "--rl-critic-tp-size 2 --rl-critic-pp-size 1")
    case = request_of(*flags).case
    assert case.critic is not None and case.critic.ranks == tuple(range(8, 16))
    assert case.train.world_size == case.rollout.world_size == case.critic.train.world_size == 8
    assert plan_case(case).memory.phase(TRAIN_CRITIC).rank in case.critic.ranks


def test_critic_of_other_checkpoint_has_its_shape() -> None:
    init = f"--rl-critic-init {CONFIGS / 'qwen3-0.6b.json'}"
    case = request_of(init, "--rl-critic-ep-size 1").case
    assert case.critic is not None and case.critic.shape.experts is None
    assert case.critic.shape.num_layers == 28


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--rl-critic-tp-size 3", "of the critic: .*-size 3 .* does not divide the world of 16"),
        ("--rl-critic-ep-size 5", "of the critic: .*does not divide"),
        ("--rl-critic-ranks 8-16", "--rl-critic-ranks 8-16 names rank 16"),
        ("--rl-critic-init /nowhere", "--rl-critic-init /nowhere is not there; give a config.json"),
        (
            "--rl-critic-tp-size 1 --rl-critic-pp-size 1 --rl-num-prompts-per-step 2",
            "of the critic: .* samples do not divide into .* 16 data-parallel ranks",
        ),
    ],
)
def test_impossible_critic_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        request_of(flags)


def test_batch_divides_into_ranks_of_both_models() -> None:
    layout = "--rl-critic-tp-size 1 --rl-critic-pp-size 1"
    for flags in ("--rl-num-epochs 1 --rl-algorithm gspo --rl-advantage gae", ""):
        assert request_of(layout, flags).step.samples % 16 == 0


# ---------------------------------------------------------------------------------------- in phases


def test_every_phase_holds_both_models_and_activations_of_one() -> None:
    case = request_of(OWN, "--rl-offload none").case
    assert case.critic is not None
    memory = plan_case(case).memory
    names = [phase.name for phase in memory.phases]
    before = [BUILD, START, CANARY, FIRST_SWITCH]
    steps = [LOG_PROBS, VALUES, TRAIN, TRAIN_CRITIC, HAND_OVER]
    assert names == [*before, ROLLOUT, *steps]
    phases = {phase.name: phase for phase in memory.phases}
    for phase in memory.phases:
        if phase.name == START:  # all of both is away
            assert not {"weights", "critic weights"} & phase.parts.keys()
            continue
        actor, critic = (
            stage_state(model, with_moments=phase.name not in before)[
                model.train.pp_rank(phase.rank)
            ]
            for model in case.models
        )
        for part, size in actor.items():
            assert phase.parts[part] == size
        for part, size in critic.items():
            assert phase.parts[f"critic {part}"] == size
    models = {TRAIN: case.actor, TRAIN_CRITIC: case.critic}
    for name, model in models.items():
        used = train_activation_bytes(model)
        assert phases[name].parts["activations"] == used[phases[name].stage]
    used = log_prob_activation_bytes(case.critic)
    assert phases[VALUES].parts["activations"] == used[phases[VALUES].stage]


def test_fullest_rank_counts_both_models() -> None:
    """The actor's last stage is fuller, the critic's first: it has no vocabulary at its end."""
    case = with_critic(llama())
    assert case.critic is not None
    held = [[sum(state.values()) for state in stage_state(model)] for model in case.models]
    used = train_activation_bytes(case.actor)
    stages = map(case.train.pp_rank, range(8))
    totals = [sum(of_model[stage] for of_model in held) + used[stage] for stage in stages]
    train = plan_case(case).memory.phase(TRAIN)
    assert train.total_bytes == max(totals) and totals[train.rank] == max(totals)


def test_critic_is_offloaded_like_actor() -> None:
    kinds = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer"}
    for away in (set(), {"gradients"}, {"gradients", "optimizer"}, set(kinds)):
        case = with_critic(llama(offloaded=frozenset(away)))
        memory = plan_case(case).memory
        parts = {phase.name: phase.parts for phase in memory.phases}
        for kind, part in kinds.items():
            assert (f"critic {part}" in parts[ROLLOUT]) == (kind not in away)
            there = kind not in away or kind == "parameters"
            assert (f"critic {part}" in parts[HAND_OVER]) == there
        copied = {name for name in memory.host_bytes if name.startswith("critic's offloaded")}
        assert copied == {f"critic's offloaded {kind}" for kind in away - {"gradients"}}
    optimizer = max(state["optimizer"] for state in stage_state(case.critic or case.actor))
    assert memory.host_bytes["critic's offloaded optimizer"] == 8 * optimizer
    assert "critic's reference policy" not in memory.host_bytes


def test_critic_without_vocabulary_needs_less_for_head() -> None:
    case = with_critic(llama(chunk_tokens=4096))
    assert case.critic is not None
    head = head_bytes(case.critic, with_gradients=True)
    assert 0 < head < head_bytes(case.actor, with_gradients=True)
    # 4096 tokens of 4096 numbers, over two ranks: norm, its input and a gradient in bf16, the head
    # and a gradient in float32
    assert head == 4096 * 4096 / 2 * (3 * 2 + 2 * 4)


def test_critic_on_own_ranks_shares_no_memory() -> None:
    alone = llama()
    ranks = tuple(range(8, 12))
    critic = with_critic(alone).critic
    assert critic is not None
    moved = in_layout(critic, TrainLayout(4, tp_size=2, pp_size=2))
    assert moved is not None
    case = dataclasses.replace(alone, critic=dataclasses.replace(moved, ranks=ranks))
    resident = plan_case(alone).traffic.resident
    both, without = memory_of(case, resident), memory_of(alone, resident)
    of_critic = (BUILD_CRITIC, TRAIN_CRITIC, VALUES)
    assert {p.name for p in both.phases} >= set(of_critic)
    of_actor = [p for p in both.phases if p.name not in of_critic]
    assert of_actor == list(without.phases)
    train = both.phase(TRAIN_CRITIC)
    assert train.rank in ranks
    assert not {"weights", "gradients", "optimizer"} & train.parts.keys()
    stages = [sum(state.values()) for state in stage_state(moved)]
    assert train.total_bytes - train.parts["activations"] == stages[train.stage]


# ------------------------------------------------------------------------------- advice and search


def test_following_keeps_own_degrees_of_critic() -> None:
    critic = with_critic(llama(num_micro_batches=32)).critic
    assert critic is not None
    train = TrainLayout(8, tp_size=1, pp_size=2)
    layers = pipeline_layers(32, 2)
    found = following(critic, train, layers)
    assert found is not None and found.train == train and found.layers == layers
    assert found.training.num_micro_batches * 4 == 32 * 1
    assert not found.training.sequence_parallel
    own = dataclasses.replace(critic, own_degrees=frozenset({"pp_size"}))
    found = following(own, train, layers)
    assert found is not None and found.train.pp_size == 4 and found.layers == critic.layers
    # Three micro-batches are no two data-parallel ranks' worth.
    odd = dataclasses.replace(critic.training, num_micro_batches=3)
    assert following(dataclasses.replace(critic, training=odd), train, layers) is None
    # Even stages there are none, and uneven ones would need a flag.
    assert in_layout(critic, TrainLayout(10, tp_size=2, pp_size=5)) is None


@pytest.mark.parametrize("name", [TRAIN, TRAIN_CRITIC])
def test_every_remedy_reduces_lacking_bytes_of_both_models(name: str) -> None:
    case = with_critic(llama(**LONG))
    case = dataclasses.replace(case, machine=dataclasses.replace(case.machine, gpu_bytes=60 * GB))
    assert_remedies_help(plan_case(case), name)


def test_own_layout_of_critic_is_advised_and_helps() -> None:
    case = request_of("--rl-critic-ep-size 1 --gpu-memory-gb 60").case
    outcome = plan_case(case)
    advised = [r.flags for p in outcome.problems for r in p.remedies]
    assert "--rl-critic-ep-size 2" in advised
    wider = request_of("--rl-critic-ep-size 2 --gpu-memory-gb 60").case
    lacking = {p.where: p.lacking_bytes for p in plan_case(wider).problems}
    for problem in outcome.problems:
        for remedy in problem.remedies:
            if remedy.flags == "--rl-critic-ep-size 2":
                assert remedy.lacking_bytes == lacking.get(problem.where, 0)


def test_search_counts_critic() -> None:
    train, rollout = TrainLayout(16, tp_size=8, pp_size=2), RolloutLayout(16, 8, False)
    alone = case_of("llama-3.1-8b", train, rollout)
    both = search(with_critic(alone), STEP, top=3)
    assert both.candidates and both.num_fitting < search(alone, STEP, top=3).num_fitting
    for candidate in both.candidates:
        critic = candidate.case.critic
        assert critic is not None and critic.train == candidate.case.train
        assert plan_case(candidate.case).fits


# ------------------------------------------------------------------------------------------ printed


def printed(outcome: Outcome) -> list[str]:
    console = Console(file=io.StringIO(), width=100, highlight=False)
    print_plan(outcome, (), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_plan_of_ppo_has_line_for_each_model() -> None:
    outcome = plan_case(request_of(OWN).case)
    lines = printed(outcome)
    assert sum(line.startswith("train    TP4 x CP1 x DP2 x PP2") for line in lines) == 1
    assert sum(line.startswith("critic   TP2 x CP1 x DP8 x PP1") for line in lines) == 1
    assert sum("micro-batches of" in line for line in lines) == 2
    assert sum(line.startswith("critic: ") for line in lines) == 1
    table = [line for line in lines if line.startswith("  critic's ")]
    assert len(table) == len(outcome.memory.phases) - 1  # at the start it is away
    assert "…" not in "\n".join(lines)
    found = as_json(outcome)
    assert found["critic"]["tp_size"] == 2 and found["critic"]["architecture"] == "qwen3_moe"
    assert found["phases"][0]["critic_optimizer_bytes"] > 0
    assert found["settings"]["critic"]["num_micro_batches"] > 0


def test_plan_without_critic_does_not_mention_critic() -> None:
    outcome = plan_case(request_of(algorithm="grpo").case)
    assert not any("critic" in line for line in printed(outcome))
    assert "critic" not in as_json(outcome)
