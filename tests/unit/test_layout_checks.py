"""Rollout layouts from flags: nodes, expert parallelism of engines, stages."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
from vllm.config.parallel import All2AllBackend

from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.hybrid_engine.options import EngineOptions
from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.job.batches import check_batches
from mcore_rl.job.engines import notes_on_sampling_ahead
from mcore_rl.job.layout import (
    check_layout,
    check_rollout,
    check_stages,
    note_on_experts,
    ranks_per_node,
)
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import (
    ALL2ALL_BACKENDS,
    NOT_RELOADABLE,
    RolloutLayout,
    TrainLayout,
    pipeline_layers,
)
from mcore_rl.model.roles import Roles
from tests.model_shapes import published_shape, small_shape


def rollout(world_size: int, **given: Any) -> Any:
    layout = TrainLayout(world_size, tp_size=4, ep_size=4)
    shape = replace(small_shape(), num_heads=48, num_kv_heads=48)
    layers = pipeline_layers(shape.num_layers, 1)
    return check_rollout(EngineOptions(**given), shape, layout, layers, has_cuda=True)


def laid_out(world_size: int, *, ep_size: int, has_cuda: bool, **given: Any) -> tuple:
    """The engines' layout and the notes about it."""
    layout = TrainLayout(world_size, tp_size=4, ep_size=ep_size)
    shape = replace(small_shape(), num_heads=48, num_kv_heads=48, latent=None)
    experts = replace(shape.experts, num_experts=48, shared_hidden_size=192)
    shape = replace(shape, experts=experts, ffn_hidden_size=192)
    layers = pipeline_layers(shape.num_layers, 1)
    options = EngineOptions(ranks_per_node=world_size, **given)
    found = check_rollout(options, shape, layout, layers, has_cuda=has_cuda)
    return found, note_on_experts(options, Placement(shape, layout, layers, found))


@pytest.mark.parametrize(
    ("world_size", "given", "sentence"),
    [
        (12, {"ranks_per_node": 8}, r"--rl-ranks-per-node 8 does not divide the world of 12"),
        (12, {"ranks_per_node": 6}, r"--rl-rollout-tp-size 4 lets .* 4-7 straddle machines of 6 "),
        (16, {"rollout_ep_size": 6}, r"--rl-rollout-ep-size 6 is not a multiple .* TP size 4"),
        (16, {"rollout_ep_size": 12}, r"--rl-rollout-ep-size 12 .* not divide the world of 16"),
        (16, {"rollout_all2all_backend": "moonep"}, "--rl-rollout-all2all-backend moonep: .*leave"),
        (16, {"rollout_all2all_backend": "deepep"}, "deepep is not a vLLM .*; choose one of allga"),
    ],
)
def test_impossible_rollout_layout_is_refused(world_size: int, given: dict, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        rollout(world_size, **given)


@pytest.mark.parametrize(
    ("own_ranks", "per_node", "expected"),
    [
        (range(8, 12), 4, (4, 4)),  # a node of their own
        (range(12, 14), 0, (2, 2)),  # Megatron's TP does not divide them
        (range(4, 16), 8, (4, 4)),
        (range(6, 10), 8, r"--rl-rollout-tp-size 4 lets .* ranks 6-9 straddle .* or other ranks"),
    ],
)
def test_engines_on_ranks_of_their_own_stay_within_nodes(
    own_ranks: range, per_node: int, expected: tuple[int, int] | str
) -> None:
    shape = small_shape()
    found = partial(
        check_rollout,
        *(EngineOptions(ranks_per_node=per_node), shape, TrainLayout(4, tp_size=4, ep_size=4)),
        pipeline_layers(shape.num_layers, 1),
        roles=Roles(16, rollout=tuple(own_ranks)),
        has_cuda=True,
    )
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            found()
    else:
        layout = found()
        assert (layout.tp_size, layout.ep_size) == expected
        assert layout.world_size == len(own_ranks) and layout.is_identity


def test_controllers_of_servers_are_the_only_ranks_of_their_engines() -> None:
    shape, train = small_shape(), TrainLayout(4, tp_size=4, ep_size=4)
    layers, roles = pipeline_layers(shape.num_layers, 1), Roles(4, rollout=(4, 5))
    found = check_rollout(EngineOptions(), shape, train, layers, roles=roles, has_cuda=True)
    assert found == RolloutLayout(2, tp_size=1, expert_parallel=False)


def test_default_that_does_not_fit_is_named_as_one() -> None:
    shape, layout = small_shape(), TrainLayout(4, tp_size=4, ep_size=2)
    assert shape.experts is not None
    shape = replace(shape, experts=replace(shape.experts, num_experts=6))
    layers = pipeline_layers(shape.num_layers, 1)
    with pytest.raises(UsageError, match=r"--rl-rollout-ep-size 4 \(by default, .* experts 6"):
        check_rollout(EngineOptions(), shape, layout, layers, has_cuda=True)


def test_start_describes_what_is_sampled_ahead() -> None:
    layout = RolloutLayout(4, tp_size=2, expert_parallel=False)

    def notes(**options: Any) -> list[str]:
        config = RLConfig.of(rollout_max_num_seqs=48, **options)
        return list(notes_on_sampling_ahead(config, layout))

    apart = {"rollout_ranks": "4-7", "num_prompts_per_step": 8, "num_samples_per_prompt": 4}
    assert notes() == notes(**apart, max_staleness=0) == []
    size, correction = notes(**apart, max_staleness=2)
    assert "(2 + 1) x 8 prompts x 4 samples = 96 responses" in size and "run 96 at" in size
    assert "staleness of up to 2" in correction and "--rl-mismatch-correction" in correction
    assert len(notes(**apart, mismatch_correction="token_tis")) == 1


def delta_net(**sizes: int) -> ModelShape:
    shape = published_shape("qwen3.5-9b")
    assert shape.delta_net is not None
    return replace(shape, delta_net=replace(shape.delta_net, **sizes))


def test_degrees_that_split_a_delta_nets_head_are_refused() -> None:
    degrees = {"tensor_model_parallel_size": 4, "context_parallel_size": 8}
    sentence = r"--context-parallel-size 8 x --tensor-.* 4 .*linear_num_key_heads 16; choose"
    with pytest.raises(UsageError, match=sentence):
        check_layout(delta_net(), degrees, 32)
    with pytest.raises(UsageError, match="--tensor-.* 4 .*linear_num_key_heads 6; choose"):
        check_layout(delta_net(num_key_heads=6), {"tensor_model_parallel_size": 4}, 4)


def test_heads_for_which_vllm_has_no_kernel_on_cpu_are_refused() -> None:
    layout, layers = TrainLayout(1), pipeline_layers(32, 1)

    def check(has_cuda: bool) -> None:
        shape = delta_net(value_head_dim=32)
        check_rollout(EngineOptions(), shape, layout, layers, has_cuda=has_cuda)

    check(has_cuda=True)
    with pytest.raises(UsageError, match="linear_value_head_dim 32: .*64 or 128 only; use"):
        check(has_cuda=False)


def test_all_to_all_backends_equal_those_of_vllm() -> None:
    ours = {*ALL2ALL_BACKENDS, NOT_RELOADABLE}
    # The first two were removed; the last is vLLM's to choose.
    assert ours == {*get_args(All2AllBackend)} - {"naive", "pplx", "passthrough"}


def test_rollout_ep_size_spans_data_parallel_ranks_of_engine() -> None:
    found = rollout(16, rollout_ep_size=8, ranks_per_node=8)
    assert (found.tp_size, found.dp_size, found.ep_size, found.num_engines) == (4, 2, 8, 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (4, 2, 8)),  # Megatron's EP, on two data-parallel ranks of an engine
        ({"rollout_tp_size": 2}, (2, 4, 8)),
        ({"rollout_tp_size": 8}, (8, 1, 8)),
        ({"rollout_tp_size": 16}, (16, 1, 16)),  # engines have no smaller EP than their TP
        ({"rollout_ep_size": 4}, (4, 1, 4)),
        ({"rollout_no_expert_parallel": True}, (4, 1, 1)),
    ],
)
def test_engines_keep_expert_parallelism_of_megatron(given: dict, expected: tuple) -> None:
    found, notes = laid_out(16, ep_size=8, has_cuda=True, **given)
    assert (found.tp_size, found.dp_size, found.ep_size) == expected
    assert notes == []


def test_change_of_expert_parallelism_is_noted_with_cost() -> None:
    on_cpu, (note,) = laid_out(16, ep_size=8, has_cuda=False)
    assert on_cpu.ep_size == on_cpu.tp_size == 4
    found = re.search(r"EP4, .* EP8, .*receives up to (\S+) GB .* EP (\S+) GB; .* GPUs only", note)
    assert found is not None and float(found[1]) > float(found[2]) >= 0
    other, (note,) = laid_out(48, ep_size=8, has_cuda=True, rollout_tp_size=3)
    assert other.ep_size == other.tp_size == 3
    assert "--rl-rollout-tp-size 3 does not divide --expert-model-parallel-size 8" in note


def test_tp_group_may_fill_whole_nodes() -> None:
    assert rollout(16, rollout_tp_size=8, ranks_per_node=4).tp_size == 8


def test_ranks_per_node_come_from_flag_then_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_per_node(EngineOptions(), 64) == 8
    assert ranks_per_node(EngineOptions(), 4) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert ranks_per_node(EngineOptions(), 64) == 16
    assert ranks_per_node(EngineOptions(ranks_per_node=4), 64) == 4


HYBRID_EP = {"moe_flex_dispatcher_backend": "hybridep"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"moe_flex_dispatcher_backend": "ncclep"}, "-backend ncclep .* micro-batch .*; give deep"),
        (HYBRID_EP, "hybridep needs as many .* add --moe-hybridep-pad-uneven-dispatch-inputs"),
        ({"moe_flex_dispatcher_backend": "deepep"}, None),
        ({**HYBRID_EP, "moe_hybridep_pad_uneven_dispatch_inputs": True}, None),
        ({"moe_token_dispatcher_type": "alltoall"}, None),
        ({"moe_token_dispatcher_type": "allgather"}, None),
    ],
)
def test_dispatcher_that_needs_equal_tokens_on_ranks_is_refused(
    changed: dict[str, Any], says: str | None
) -> None:
    """A fork, which derives no flags, is checked as well."""
    values = {
        "expert_model_parallel_size": 2,
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "ncclep",
        "moe_hybridep_pad_uneven_dispatch_inputs": False,
        **changed,
    }
    if says is None:
        assert check_layout(small_shape(), values, 2).ep_size == 2
        return
    with pytest.raises(UsageError, match=says):
        check_layout(small_shape(), values, 2)


def test_optimizer_instances_must_divide_data_parallel_ranks() -> None:
    shape = small_shape()
    values = {"context_parallel_size": 2, "expert_model_parallel_size": 4}
    check_layout(shape, {**values, "num_distributed_optimizer_instances": 2}, 8)
    says = "instances 4 divides .* 4 x --context-parallel-size 2, or 2 of an expert; give a divisor"
    with pytest.raises(UsageError, match=says):
        check_layout(shape, {**values, "num_distributed_optimizer_instances": 4}, 8)
    with pytest.raises(UsageError, match="--num-distributed-optimizer-instances 3 divides"):
        check_layout(shape, {"num_distributed_optimizer_instances": 3}, 8)


def test_stages_follow_flags() -> None:
    shape = small_shape(num_layers=8)
    even = check_stages(shape, 2, {"num_layers_per_virtual_pipeline_stage": 2})
    assert even == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    custom = check_stages(shape, 2, {"pipeline_model_parallel_layout": "Ett|tttttt,L"})
    assert [len(chunks[0]) for chunks in custom] == [2, 6]
    counted = {"account_for_embedding_in_pipeline_split": True}
    assert [len(c[0]) for c in check_stages(replace(shape, num_layers=7), 2, counted)] == [3, 4]
    with pytest.raises(UsageError, match="8 layers, with one more each by --account-for-embedding"):
        check_stages(shape, 2, counted)
    with pytest.raises(UsageError, match="does not divide the 4 layers of a stage"):
        check_stages(shape, 2, {"num_layers_per_virtual_pipeline_stage": 3})
    with pytest.raises(UsageError, match="cannot be read"):
        check_stages(shape, 2, {"pipeline_model_parallel_layout": "Ett|ttt|tttL"})


PER_RANK = {"num_virtual_stages_per_pipeline_rank": 2}
GROUP = "microbatch_group_size_per_vp_stage"


def batches(
    num_samples: int, given: dict[str, Any], *, mini_batches: int = 1, packed: int = 0
) -> None:
    """Check a step on 4 ranks of PP2; each has half of the samples as micro-batches of one."""
    config = RLConfig.of(
        num_prompts_per_step=num_samples // 2,
        num_samples_per_prompt=2,
        num_mini_batches=mini_batches,
        max_tokens_per_microbatch=packed,
    )
    values = {"micro_batch_size": 1, "global_batch_size": num_samples // mini_batches, **given}
    text = given.get("pipeline_model_parallel_layout", "")
    num_layers = text.count("t") or 8
    layers = check_stages(small_shape(num_layers=num_layers), 2, given)
    check_batches(config, TrainLayout(4, pp_size=2), layers, values)


@pytest.mark.parametrize(
    "given",
    [
        PER_RANK,
        {"num_layers_per_virtual_pipeline_stage": 2, "num_layers": 8},
        {"pipeline_model_parallel_layout": "Et|t|t|tL"},
    ],
    ids=["per_rank", "per_chunk", "custom"],
)
def test_interleaved_micro_batches_must_be_multiple_of_stages(given: dict[str, Any]) -> None:
    flag = "--" + next(iter(given)).replace("_", "-")
    batches(8, given)
    with pytest.raises(UsageError) as raised:
        batches(6, given)
    sentence = str(raised.value)
    assert sentence.startswith(f"{flag} {next(iter(given.values()))} interleaves")
    for part in (
        "must be a multiple of --pipeline-model-parallel-size 2",
        "--rl-num-prompts-per-step 3, --rl-num-samples-per-prompt 2, --rl-num-mini-batches 1, "
        "2 data-parallel ranks and --micro-batch-size 1 make 3 of a mini-batch",
        "change one of them, or pack samples by --rl-max-tokens-per-microbatch",
    ):
        assert part in sentence
    batches(6, given, packed=64)  # then their number is made to fit


def test_any_number_of_micro_batches_is_valid_without_virtual_stages() -> None:
    with pytest.raises(UsageError, match="interleaves"):
        batches(6, {"num_virtual_stages_per_pipeline_rank": 2})
    batches(6, {})
    batches(6, {"num_virtual_stages_per_pipeline_rank": 1})
    batches(6, {"num_layers_per_virtual_pipeline_stage": 4, "num_layers": 8})
    batches(6, {"pipeline_model_parallel_layout": "Et|tL"})


@pytest.mark.parametrize(
    ("group", "samples", "mini_batches", "sentence"),
    [
        (1, 8, 1, "-stage 1 is less than --pipeline-model-parallel-size 2, .*; raise or drop it"),
        (4, 4, 1, "must be --microbatch-.* 4 or more, .* make 2 of a mini-batch"),
        (3, 8, 1, "none or at least --pipeline-model-parallel-size 2 left .* make 4 of a mini"),
        (3, 10, 1, None),  # 5 is a group and the 2 that it takes at least
        (3, 20, 2, "make 10 of a step"),  # whose log-probs are one pass: three groups and one left
    ],
)
def test_micro_batch_groups_follow_rule_of_megatron(
    group: int, samples: int, mini_batches: int, sentence: str | None
) -> None:
    given = {**PER_RANK, GROUP: group}
    if sentence is None:
        batches(samples, given, mini_batches=mini_batches)
        return
    with pytest.raises(UsageError, match=sentence):
        batches(samples, given, mini_batches=mini_batches)


def test_interleaving_is_refused_exactly_as_by_megatron() -> None:
    """The oracle is the condition of Megatron's schedule."""
    for group in range(1, 6):
        for micro_batches in range(1, 13):
            rest = micro_batches % group
            refused = group > micro_batches or group < 2 or 0 < rest < 2
            try:
                batches(2 * micro_batches, {**PER_RANK, GROUP: group})
                assert not refused, (group, micro_batches)
            except UsageError:
                assert refused, (group, micro_batches)


def test_experts_with_biases_are_not_split() -> None:
    values = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    says = "--expert-tensor-parallel-size 2 splits experts with biases, which gpt_oss has"
    with pytest.raises(UsageError, match=says):
        check_layout(published_shape("gpt-oss-20b"), values, 2)
    values["expert_tensor_parallel_size"] = 1
    assert check_layout(published_shape("gpt-oss-20b"), values, 2).etp_size == 1
