"""The exact part of a plan against what real Megatron models and optimizers hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.planner.activations import teacher_activation_bytes, train_activation_bytes
from mcore_rl.planner.engine import absorbed_bytes
from mcore_rl.planner.models import (
    TrainedModel,
    stage_parameters,
    stage_state,
    teacher_head_bytes,
)
from mcore_rl.planner.phases import (
    CANARY,
    EXPORT,
    FIRST_SWITCH,
    HAND_OVER,
    LOG_PROBS,
    TRAIN,
    Case,
)
from mcore_rl.planner.plan import plan_case
from mcore_rl.tools.plan.command_line import read_command_line
from tests.dist.layouts import SPLITS, job_flags
from tests.rank_pool import RankPool

# name -> architecture, options of the checkpoint, split, precision
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "latent_moe": ("deepseek_v3", {}, "tp2_pp2_ep2", "bf16"),
    "tied_dense": ("qwen3", {"tie_word_embeddings": True}, "tp1_pp2_ep1", "bf16"),
    "shared_out": ("qwen3_moe", {}, "dp2", "bf16"),
    "float32": ("qwen3", {}, "tp2_pp1_ep1", "fp32"),
    "trained_mtp": ("deepseek_v3", {"num_mtp_layers": 1}, "tp2_pp2_ep2", "bf16"),
    "adapters": ("deepseek_v3", {}, "tp2_pp2_ep2", "bf16"),
    "adapters_shared_out": ("qwen3_moe", {}, "dp2", "bf16"),
}


# name -> architecture, the actor's split, flags of the critic
CRITICS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "critic_like_the_actor": ("deepseek_v3", "tp2_pp2_ep2", ()),
    "critic_of_its_own_layout": (
        "qwen3_moe",
        "tp1_pp2_ep1",
        ("--rl-critic-tp-size", "2", "--rl-critic-pp-size", "1", "--rl-critic-ep-size", "2"),
    ),
    "critic_shared_out": ("qwen3", "dp2", ()),
}


def case_of(flags: list[str], world_size: int, *more: str) -> Case:
    return read_command_line([*flags, "--world-size", str(world_size), *more]).case


def assert_equals_what_is_held(model: TrainedModel, measured: list[dict[str, Any]]) -> None:
    """What is planned of a model against what its ranks hold, but for padding."""
    train, training = model.train, model.training
    planned = stage_state(model)
    for rank, held in enumerate(measured):
        stage = train.pp_rank(rank)
        padding = held["padding_elements"]
        assert held["weights"] == planned[stage]["weights"]
        in_buffers = held["gradients"] - planned[stage]["gradients"]
        assert 0 <= in_buffers <= padding * training.gradient_bytes
        # Padding moves the borders between data-parallel ranks.
        of_rank = abs(held["optimizer"] - planned[stage]["optimizer"])
        limit = padding if train.dp_size > 1 else 0
        assert of_rank <= limit * training.optimizer_bytes
    # All data-parallel ranks together hold the state of every parameter once.
    parameters = stage_parameters(model)
    for stage, of_stage in enumerate(parameters):
        members = [r for r in range(len(measured)) if train.pp_rank(r) == stage]
        state = sum(measured[rank]["optimizer"] for rank in members)
        dense = (of_stage.dense - of_stage.frozen) * len(members) // train.dp_size
        experts = of_stage.experts - of_stage.frozen_experts
        experts = experts * len(members) // train.edp_size
        assert state == (dense + experts) * training.optimizer_bytes


@pytest.mark.parametrize("name", list(CASES))
def test_plan_equals_what_training_holds(
    name: str, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    arch, options, split, precision = CASES[name]
    world_size = SPLITS[split][3]
    flags = job_flags(checkpoint_factory(arch, **options), split, precision=precision)
    flags += ["--mtp-num-layers", "1"] if "num_mtp_layers" in options else []
    flags += ["--rl-lora-rank", "4"] if name.startswith("adapters") else []
    case = case_of(flags, world_size)
    assert case.critic is None
    measured = ranks.run(
        "tests.dist.planner_jobs:measured_bytes", world_size=world_size, flags=flags
    )
    assert_equals_what_is_held(case.actor, measured)


@pytest.mark.parametrize("name", list(CRITICS))
def test_plan_of_a_critic_equals_what_it_holds(
    name: str, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    arch, split, own = CRITICS[name]
    world_size = SPLITS[split][3]
    flags = job_flags(
        checkpoint_factory(arch), split, "--rl-algorithm", "ppo", *own, precision="bf16"
    )
    case = case_of(flags, world_size)
    assert case.critic is not None
    measured = ranks.run(
        "tests.dist.planner_jobs:measured_bytes_of_critic", world_size=world_size, flags=flags
    )
    assert {held["layout"] for held in measured} == {case.critic.train.describe()}
    assert_equals_what_is_held(case.critic, measured)
    if case.critic.train == case.train:  # one number for each token, instead of the vocabulary's
        assert measured[-1]["weights"] < stage_state(case.actor)[-1]["weights"]


# Of what the plan says of activations: without a GPU no kernel is fused, and norms, SwiGLU, softmax
# and Adam keep steps in between, in float32.
ACTIVATIONS = (0.2, 1.2)
# What a rank has beside its model: rotary tables, Adam's steps, scalars. And tensors of the host,
# which on CPU is the device: what a bucket is read from, and what is hashed.
SMALL_BYTES = 1 << 17


def check_teacher(case: Case, measured: list[dict[str, dict[str, int]]]) -> None:
    """What is planned of scoring by a teacher, and of learning from it."""
    (teacher,), dp_size = case.scoring_teachers, case.train.dp_size
    assert case.num_swapped == 1
    for rank, found in enumerate(measured):
        stage = case.train.pp_rank(rank)
        tokens = found["teacher"]["tokens"] * dp_size
        planned = {
            "teacher": teacher_activation_bytes(teacher, tokens)[stage],
            "train with a teacher": train_activation_bytes(case.actor)[stage],
        }
        for name, num_bytes in planned.items():
            least, most = ACTIVATIONS
            assert least <= num_bytes / found[name]["peak"] <= most, (rank, name, planned, found)
        head = teacher_head_bytes(case.actor)[stage]
        assert 0 <= found["teacher head"]["held"] - head <= SMALL_BYTES, rank


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["deepseek_v3", "qwen3_moe"])
def test_every_phase_holds_what_is_planned(
    arch: str, checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    """A run phase by phase; the device is the host here, and nothing is away."""
    split, form = {"deepseek_v3": ("tp2_pp2_ep2", "topk"), "qwen3_moe": ("dp2", "full")}[arch]
    world_size = SPLITS[split][3]
    checkpoint = checkpoint_factory(arch)
    flags = job_flags(
        checkpoint,
        split,
        *("--rl-max-prompt-tokens", "16", "--rl-max-response-tokens", "16"),
        *("--rl-offload", "none", "--rl-reshard-bucket-mb", "1", "--rl-canary-interval", "1"),
        precision="bf16",
    )
    options = {"world_size": world_size, "timeout_seconds": 250}
    teacher = ["--rl-teacher", str(checkpoint), "--rl-teacher-form", form]
    measured = ranks.run(
        "tests.dist.planner_jobs:bytes_in_phases",
        flags=[*flags, *teacher],
        checkpoints=tmp_path,
        **options,
    )
    check_teacher(case_of([*flags, *teacher], world_size), measured)
    load = [*flags, "--load", str(tmp_path)]
    after_load = ranks.run("tests.dist.planner_jobs:bytes_after_load", flags=load, **options)

    exported = ("--rl-export-hf", str(tmp_path / "exported again"))
    case = case_of(flags, world_size, *exported, "--communicator-mb", "0")
    outcome = plan_case(case)
    memory = outcome.memory
    fresh, whole = stage_state(case.actor, with_moments=False), stage_state(case.actor)
    absorbed = absorbed_bytes(case.shape, case.rollout.tp_size)
    for rank, found in enumerate(measured):
        stage = case.train.pp_rank(rank)
        # Exact but for padding: what is built, what an update adds, what is loaded.
        built = found["build"]["held"]
        assert 0 <= built - sum(fresh[stage].values()) <= SMALL_BYTES, rank
        moments = whole[stage]["optimizer"] - fresh[stage]["optimizer"]
        assert abs(found["first update"]["held"] - moments) <= SMALL_BYTES, rank
        loaded = after_load[rank]["resume"]["held"]
        assert abs(loaded - sum(whole[stage].values())) <= SMALL_BYTES, rank
        # vLLM pads its vocabulary to a multiple of 64.
        stored = found["rollout weights"]["held"] - absorbed - outcome.traffic.resident[rank]
        assert 0 <= stored <= 2 * 63 * case.shape.hidden_size * 2, rank
        # By formula.
        for name in (CANARY, LOG_PROBS, TRAIN):
            least, most = ACTIVATIONS
            peak = found[name]["peak"] - max(0, found[name]["held"])
            planned = memory.phase(name).parts["activations"]
            assert least <= planned / peak <= most, (rank, name, planned, peak)
        # Beside both sides' weights.
        for name in (FIRST_SWITCH, HAND_OVER):
            bucket = memory.phase(name).parts["bucket"]
            assert found[name]["peak"] <= bucket + SMALL_BYTES, (rank, name)
        files = memory.host_bytes["file being exported"] // world_size
        bucket = memory.phase(EXPORT).parts["bucket"]
        assert found["export"]["peak"] <= bucket + files + SMALL_BYTES, rank
        # A checkpoint is written and read tensor by tensor, in pieces of some.
        checkpoint = memory.host_bytes["checkpoint being written"] // world_size
        assert 0.2 * checkpoint <= found["save"]["peak"] <= checkpoint + SMALL_BYTES, rank
        # A reader has the tensor that it has read before, too.
        assert after_load[rank]["resume"]["peak"] - loaded <= 2 * checkpoint + SMALL_BYTES, rank
