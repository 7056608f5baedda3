"""The planner's figures against known ones and published formulas; properties of its advice."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mcore_rl.batching.sample_exchange import Moves, Shares
from mcore_rl.hybrid_engine.plan.placement import Placement, with_rank_map
from mcore_rl.hybrid_engine.plan.transfer_plan import make_plan
from mcore_rl.hybrid_engine.plan.trees import KnownGroups
from mcore_rl.model.config_json import LayerKind, ModelShape, model_shape
from mcore_rl.model.layout import RolloutLayout, TrainLayout, pipeline_layers
from mcore_rl.model.lora import LoraOptions, resolve_lora
from mcore_rl.moe.routing import Routes
from mcore_rl.planner.activations import (
    layer_terms,
    micro_batches_in_flight,
    train_activation_bytes,
)
from mcore_rl.planner.advice import HOST, Problem
from mcore_rl.planner.engine import kv_bytes_per_token, state_bytes
from mcore_rl.planner.layouts import stages_for
from mcore_rl.planner.links import neighbourhoods, traffic_of
from mcore_rl.planner.memory import (
    EXPORTED_FILE_BYTES,
    adapters_of,
    candidate_bytes,
    routed_bytes,
    sampled_bytes,
)
from mcore_rl.planner.models import (
    TrainedModel,
    optimizer_parameters,
    stage_parameters,
    stage_state,
)
from mcore_rl.planner.phases import (
    BUILD,
    CANARY,
    EXPORT,
    FIRST_SWITCH,
    HAND_OVER,
    LOG_PROBS,
    NCCL,
    RESUME,
    ROLLOUT,
    START,
    TRAIN,
    Case,
    communicators_of,
)
from mcore_rl.planner.plan import Outcome, as_json, plan_case
from mcore_rl.planner.report import print_plan, print_seconds
from mcore_rl.planner.search import search
from mcore_rl.planner.settings import GB, MB, MIB, EngineSettings, Machine, Recompute, TrainSettings
from mcore_rl.planner.step_seconds import Step, engine_step_seconds
from scripts.make_tiny_deepseek import ARCHS, hf_config
from tests.model_shapes import CONFIGS, published_shape, small_shape

FULL = Recompute(granularity="full", method="uniform")
MACHINE = Machine(
    ranks_per_node=8,
    gpu_bytes=80 * GB,
    reserved_bytes=5 * GB,
    host_bytes=2000 * GB,
    own_node_rate=400e9,
    other_nodes_rate=50e9,
)
TRAINING = TrainSettings(
    weight_bytes=2,
    gradient_bytes=4,
    optimizer_bytes=12,
    moment_bytes=8,
    distributed_optimizer=True,
    optimizer_instances=1,
    optimizer_host_share=0.0,
    vocabulary_multiple=None,
    micro_batch_size=1,
    num_micro_batches=32,
    positions=4096,
    sequence_parallel=True,
    recompute=FULL,
    chunk_tokens=1024,
    expert_load=1.0,
)
ENGINE = EngineSettings(
    gpu_memory_utilization=0.7,
    max_num_seqs=128,
    max_model_tokens=4096,
    max_response_tokens=3072,
    batched_tokens=8192,
    bucket_bytes=512 * MIB,
    delta=False,
    may_spread_experts=True,
    offloaded=frozenset({"gradients", "optimizer"}),
    away_at_start=frozenset({"gradients", "optimizer", "parameters"}),
    keeps_gradients=False,
    keeps_reference=False,
    saves_checkpoints=False,
)

LLAMA, DEEP = TrainLayout(8, tp_size=4, pp_size=2), TrainLayout(8, tp_size=2, pp_size=4)
STEP = Step(samples=512, mini_batches=1, flops=400e12, memory_rate=3e12)


def case_of(
    name: str,
    train: TrainLayout,
    rollout: RolloutLayout,
    machine: Machine = MACHINE,
    **changes: Any,
) -> Case:
    """A case with its rank map; `changes` are of the training or the engine."""
    shape = published_shape(name)
    stages = stages_for(shape.num_layers, train.pp_size)
    assert stages is not None
    placement = Placement(shape, train, stages.layers, rollout)
    of_training = {k: v for k, v in changes.items() if k in TrainSettings.__dataclass_fields__}
    of_engine = {k: v for k, v in changes.items() if k not in of_training}
    return Case(
        shape=shape,
        train=train,
        layers=stages.layers,
        rollout=with_rank_map(placement, ranks_per_node=machine.ranks_per_node),
        training=dataclasses.replace(
            TRAINING, **{"sequence_parallel": train.tp_size > 1, **of_training}
        ),
        engine=dataclasses.replace(ENGINE, **of_engine),
        machine=machine,
    )


def machine(**changes: Any) -> Machine:
    return dataclasses.replace(MACHINE, **changes)


def model_of(name: str, train: TrainLayout, **changes: Any) -> TrainedModel:
    """A trained model in the default stages; `changes` are of the training."""
    return case_of(name, train, RolloutLayout(train.world_size, 1, False), **changes).actor


def llama(
    machine: Machine = MACHINE, train: TrainLayout = LLAMA, tp_size: int = 4, **changes: Any
) -> Case:
    """Llama 3.1 8B on 8 ranks."""
    return case_of("llama-3.1-8b", train, RolloutLayout(8, tp_size, False), machine, **changes)


def deepseek_v3_case(**changes: Any) -> Case:
    """TP8 PP8 EP32 on 256 ranks, to engines of TP8 x DP4 with EP32."""
    rollout = RolloutLayout(256, 8, True, 4, all2all_backend="flashinfer_nvlink_two_sided")
    train = TrainLayout(256, tp_size=8, pp_size=8, ep_size=32)
    return case_of("deepseek-v3", train, rollout, **changes)


@functools.cache
def deepseek_v3() -> Outcome:
    return plan_case(deepseek_v3_case())


# ------------------------------------------------------------------------------- seconds of a step


def test_seconds_of_a_step_equal_sums_by_hand() -> None:
    """Llama 3.1 8B, TP4 PP2 in training with full recomputation, two engines of TP4, on 8 ranks.

    The second stage has 16 layers of 218.1e6 parameters and an output layer of 525.3e6: 4.015e9.
    """
    outcome = plan_case(llama())
    of = outcome.seconds_of_step(STEP)
    tokens = 512 * 4096
    flops = 8 * 2 * 4.0149e9 * tokens
    update = flops / (8 * 400e12) * (1 + 1 / 32) * 1.15
    assert of.compute == pytest.approx(update, rel=1e-3)
    assert of.communication == pytest.approx(
        16 * 4 * 4 * (2 * 4096 * tokens) * 3 / 4 / MACHINE.own_node_rate
    )
    assert of.hand_over == outcome.seconds
    # The optimizer alone is copied: gradients are zeroed. Both directions.
    assert of.offload == pytest.approx(
        2 * outcome.memory.host_bytes["offloaded optimizer"] / 8 / 45e9
    )
    assert of.total == pytest.approx(
        of.compute + of.communication + of.rollout + of.hand_over + of.offload
    )


def test_seconds_of_decoding_are_reads_or_products() -> None:
    """Few sequences read weights; many compute, 2 x 7.5e9 operations of a token on 4 devices."""
    case = llama()
    memory = plan_case(case).memory
    weights = memory.phase(ROLLOUT).parts["rollout weights"]
    few = engine_step_seconds(case, memory, STEP, 1, 2048)
    cache = 2048 * case.kv_bytes_per_token
    assert few == pytest.approx((weights + cache) / STEP.memory_rate)
    many = engine_step_seconds(case, memory, STEP, 100_000, 1)
    assert many == pytest.approx(100_000 * 2 * 7.505e9 / (4 * STEP.flops), rel=1e-3)


def test_printed_seconds_name_what_dominates(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = plan_case(llama())
    print_seconds(outcome, STEP, Console(width=100))
    printed = capsys.readouterr().out
    of = outcome.seconds_of_step(STEP)
    (line,) = (line for line in printed.splitlines() if line.startswith("decoding"))
    assert line.split()[1:3] == [f"{of.rollout:.2f}", f"{of.rollout / of.total:.0%}"]
    assert "8 x active parameters x tokens, 400 TFLOP/s of a device" in printed
    assert "3,072 tokens, 3000 GB/s of a device's memory" in printed


# ------------------------------------------------------------------------------------ known figures


def test_deepseek_v3_on_256_ranks_moves_known_bytes() -> None:
    found = as_json(deepseek_v3())
    assert found["received_bytes_mean"] == pytest.approx(41.1e9, rel=0.01)
    assert found["resident_bytes_max"] == pytest.approx(47.0e9, rel=0.01)
    assert found["gather_export_received_bytes_mean"] == pytest.approx(1336e9, rel=0.001)
    assert found["received_bytes_max"] == found["lower_bound_bytes_max"]
    assert found["received_over_lower_bound"] == 1.0
    # 0.82 s for a rank of average, at 50 GB/s between nodes
    slowest = found["received_bytes_max"] / 50e9
    assert found["hand_over_seconds"] == pytest.approx(slowest) == pytest.approx(0.855, abs=0.001)
    assert found["rollout"]["rank_map"] == list(range(256))


def test_deepseek_v3_has_published_number_of_parameters() -> None:
    (parameters,) = stage_parameters(model_of("deepseek-v3", TrainLayout(1)))
    assert round(parameters.total / 1e9) == 671


def test_parameters_are_counted_once_for_each_layout() -> None:
    """A search asks thousands of times for a few hundred layouts."""
    found = [stage_parameters(model_of("deepseek-v3", TrainLayout(n))) for n in (1, 8, 1)]
    assert found[0] is found[2]
    assert all(hash(published_shape(path.stem)) for path in CONFIGS.glob("*.json"))


def test_latent_cache_is_whole_on_every_rank() -> None:
    shape = published_shape("deepseek-v3")
    assert kv_bytes_per_token(shape, 1) == kv_bytes_per_token(shape, 8) == (512 + 64) * 2 * 61


@pytest.mark.parametrize(("tp_size", "heads"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_cache_of_grouped_attention_is_split_by_heads(tp_size: int, heads: int) -> None:
    shape = published_shape("llama-3.1-8b")
    assert kv_bytes_per_token(shape, tp_size) == 2 * heads * 128 * 2 * 32


def test_delta_nets_cache_a_state_per_sequence_and_nothing_per_token() -> None:
    shape = published_shape("qwen3-next-80b-a3b")  # 12 layers of 48 have attention
    assert kv_bytes_per_token(shape, 2) == 2 * 256 * 2 * 12
    assert state_bytes(shape, 2) == 36 * 2 * (16 * 128 * 128 + 3 * (2 * 8 + 16) * 128)
    assert state_bytes(published_shape("llama-3.1-8b"), 1) == 0


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "qwen3-0.6b", "mixtral-8x7b"])
@pytest.mark.parametrize(("tp_size", "dp_size"), [(1, 1), (4, 1), (8, 1), (1, 4), (4, 2)])
def test_first_slot_holds_most_rollout_weights(name: str, tp_size: int, dp_size: int) -> None:
    shape = published_shape(name)
    shape = dataclasses.replace(shape, vocab_size=shape.vocab_size - 40)  # padded
    dp_size = dp_size if shape.experts else 1  # a dense model has no use for it
    rollout = RolloutLayout(8, tp_size, dp_size > 1, dp_size)
    layers = pipeline_layers(shape.num_layers, 1)
    placement = Placement(shape, TrainLayout(8), layers, rollout)
    assert placement.most_resident_bytes == placement.resident_bytes.max()


# ------------------------------------------------------------------------------------------ traffic


@pytest.mark.parametrize("ranks_per_node", [2, 4, 8])
def test_received_bytes_are_divided_by_links(ranks_per_node: int) -> None:
    nodes = machine(ranks_per_node=ranks_per_node)
    case = case_of("qwen3-0.6b", LLAMA, RolloutLayout(8, 2, False), nodes)
    outcome = plan_case(case)
    placement = Placement(case.shape, case.train, case.layers, case.rollout)
    expected = placement.received_bytes(case.rollout.rank_map)
    traffic = outcome.traffic
    assert np.array_equal(traffic.received, expected)
    assert traffic.received_other_nodes.any() == (ranks_per_node < 8)
    assert traffic.sent_other_nodes.any() == (ranks_per_node < 8)
    # What is sent once reaches one rank at least, and no byte comes from nowhere.
    assert 0 < traffic.sent.sum() <= traffic.received.sum()


@pytest.mark.parametrize("ranks_per_node", [2, 8])
@pytest.mark.parametrize("tied", [False, True])  # a tied embedding lies on both ends
@pytest.mark.parametrize("rank_map", [(), (0, 2, 1, 3, 4, 6, 5, 7)])
def test_traffic_equals_that_of_plan(
    rank_map: tuple[int, ...], tied: bool, ranks_per_node: int
) -> None:
    train = TrainLayout(8, tp_size=4, pp_size=2, ep_size=2)
    rollout = RolloutLayout(8, 1, True, 4, rank_map)
    placement = Placement(small_shape(tied=tied), train, pipeline_layers(4, 2), rollout)
    assert_traffic_is_that_of_plan(placement, ranks_per_node)


@pytest.mark.parametrize("arch", ARCHS)
def test_traffic_of_family_equals_that_of_plan(arch: str) -> None:
    shape = model_shape(hf_config(arch), Path("config.json"))
    train = TrainLayout(8, tp_size=2, pp_size=2, ep_size=2 if shape.experts else 1)
    rollout = RolloutLayout(8, 2, shape.experts is not None)
    placement = Placement(shape, train, pipeline_layers(shape.num_layers, 2), rollout)
    assert_traffic_is_that_of_plan(placement, ranks_per_node=4)


def assert_traffic_is_that_of_plan(placement: Placement, ranks_per_node: int) -> None:
    """What the planner counts per rank is what the moves of the hand-over's own plan carry."""
    train, rollout = placement.train, placement.rollout
    near = neighbourhoods(train, ranks_per_node)
    plan = make_plan(
        placement.infos,
        order=list(placement.infos),
        have=[placement.held[at] for at in placement.train_class],
        need=[placement.needed[placement.slot_class[rollout.slot(rank)]] for rank in range(8)],
        near=near,
        groups=KnownGroups(train.groups().values()),
    )
    received, sent = np.zeros((2, 2, 8), dtype=np.int64)  # each [own node or others, ranks]
    for move in plan.moves:
        for leg in move.tree.legs:
            away = [near.node[rank] != near.node[leg.sender] for rank in leg.receivers]
            sent[int(any(away)), leg.sender] += move.num_bytes
            for rank, is_away in zip(leg.receivers, away, strict=True):
                received[int(is_away), rank] += move.num_bytes
    traffic = traffic_of(placement, rollout.rank_map, machine(ranks_per_node=ranks_per_node))
    assert np.array_equal(received, [traffic.received_own_node, traffic.received_other_nodes])
    assert np.array_equal(sent, [traffic.sent_own_node, traffic.sent_other_nodes])
    assert received.any()


def test_hand_overs_of_adapters_count_them_alone() -> None:
    targets = ("q_proj", "k_proj", "o_proj", "down_proj")
    adapters = {"lora_rank": 8, "lora_targets": targets, "loads_adapters": True}
    case = case_of("qwen3-0.6b", LLAMA, RolloutLayout(8, 2, False), **adapters)
    placement, outcome = adapters_of(case), plan_case(case)
    assert placement is not None and outcome.adapters is not None
    assert_traffic_is_that_of_plan(placement, 8)
    lora = resolve_lora(LoraOptions(rank=8, targets=",".join(targets)), case.shape)
    elements = sum(
        8
        * (rows + columns // 2 if layer.endswith(("o_proj", "down_proj")) else rows // 2 + columns)
        for layer, (rows, columns) in lora.modules.items()
    )
    assert outcome.adapters.resident.tolist() == [2 * elements] * 8
    most = int(outcome.adapters.received.max())
    assert 0 < most < 2 * elements
    assert as_json(outcome)["adapters_received_bytes_max"] == most
    assert 0 < outcome.seconds < outcome.traffic.seconds(case.machine)
    console = Console(file=io.StringIO(), width=200)
    print_plan(outcome, (), console)
    assert f"adapters alone, of which a rank receives {most:,} bytes at most" in (
        console.file.getvalue()
    )


def test_traffic_is_zero_without_moves() -> None:
    case = case_of("qwen3-0.6b", TrainLayout(2), RolloutLayout(2, 1, False))
    traffic = plan_case(case).traffic
    assert not traffic.received.any() and not traffic.sent.any()
    assert traffic.seconds(case.machine) == 0


def test_seconds_are_those_of_fullest_link() -> None:
    nodes = machine(ranks_per_node=4)
    case = case_of("qwen3-0.6b", LLAMA, RolloutLayout(8, 4, False), nodes)
    traffic = plan_case(case).traffic
    slow = dataclasses.replace(nodes, other_nodes_rate=nodes.other_nodes_rate / 2)
    assert traffic.received_other_nodes.max() > 0
    assert traffic.seconds(slow) == pytest.approx(2 * traffic.seconds(nodes))


# ------------------------------------------------------------------------------------------- memory


def test_optimizer_state_is_split_over_data_parallel_ranks() -> None:
    train = TrainLayout(64, tp_size=2, pp_size=2, ep_size=8)  # DP16, experts EDP4
    parameters = stage_parameters(model_of("qwen3-30b-a3b", train))[0]
    shared = optimizer_parameters(model_of("qwen3-30b-a3b", train))[0]
    assert shared == -(-parameters.dense // 16) - (-parameters.experts // 4)
    alone = model_of("qwen3-30b-a3b", train, distributed_optimizer=False)
    assert optimizer_parameters(alone)[0] == parameters.total


def _layer_bytes(shape: ModelShape, train: TrainLayout, **changes: Any) -> float:
    model = dataclasses.replace(model_of("llama-3.1-8b", train, **changes), shape=shape)
    return sum(t.bytes_per_token for t in layer_terms(model, LayerKind(is_moe=False)))


def test_activations_of_dense_layer_follow_published_formula() -> None:
    """Korthikanti et al., equation 4: s b h / t (34 + ...) for GELU and 4 h, with dropout.

    Without dropout masks (3 bytes), and with 3 x f instead of 2 x 4 h of an MLP's width, what is
    left of its terms for multi-head attention is counted here by hand.
    """
    h = 4096
    heads = {"num_kv_heads": 32, "num_heads": 32, "head_dim": 128, "hidden_size": h}
    shape = dataclasses.replace(published_shape("llama-3.1-8b"), **heads)
    f = shape.ffn_hidden_size
    # norm in 2h, out 2h; Q, K, V 6h; attention out 2h; second norm in 2h, out 2h; MLP 6f
    by_hand = 16 * h + 6 * f
    one = TrainLayout(1)
    per_head_statistics = 4 * 32
    assert _layer_bytes(shape, one, sequence_parallel=False) == by_hand + per_head_statistics
    # With sequence parallelism everything is divided by t.
    eight = TrainLayout(8, tp_size=8)
    divided = _layer_bytes(shape, eight, sequence_parallel=True)
    assert divided == pytest.approx((by_hand + per_head_statistics) / 8)
    kept_whole = 4 * 2 * h  # norms' inputs and outputs
    without = _layer_bytes(shape, eight, sequence_parallel=False)
    assert without == pytest.approx(divided + kept_whole * 7 / 8)


@pytest.mark.parametrize(
    ("stage", "vp_size", "num_micro_batches", "expected"),
    [
        *((0, 1, 32, 4), (3, 1, 32, 1), (0, 1, 2, 2)),
        *((0, 2, 32, 11 / 2), (3, 2, 32, 5 / 2), (0, 2, 1, 1)),
    ],
)
def test_micro_batches_in_flight_follow_schedule(
    stage: int, vp_size: int, num_micro_batches: int, expected: float
) -> None:
    found = micro_batches_in_flight(
        stage, pp_size=4, vp_size=vp_size, num_micro_batches=num_micro_batches
    )
    assert found == expected


@pytest.mark.parametrize(
    "less",
    [
        {"recompute": FULL},
        {"recompute": Recompute(granularity="full", method="block", num_layers=2)},
        *(
            {"recompute": Recompute(granularity="selective", modules=frozenset({module}))}
            for module in ("layernorm", "moe", "mla_up_proj")
        ),
        {"positions": 2048},
        {"num_micro_batches": 2},
        {"chunk_tokens": 128},
    ],
    ids=str,
)
def test_activation_savings_reduce_activations(less: dict[str, Any]) -> None:
    train = TrainLayout(8, tp_size=2, pp_size=4, ep_size=2)
    before, after = (
        train_activation_bytes(
            model_of("deepseek-v2-lite", train, **{"recompute": Recompute(), **changes})
        )
        for changes in ({}, less)
    )
    assert sum(after) < sum(before)
    assert all(a <= b for a, b in zip(after, before, strict=True))


def test_state_not_offloaded_stays_during_rollout() -> None:
    everything = {"gradients", "optimizer", "parameters"}
    for away in (set(), {"gradients"}, {"gradients", "optimizer"}, everything):
        case = llama(offloaded=frozenset(away))
        memory = plan_case(case).memory
        parts = {phase.name: phase.parts for phase in memory.phases}
        staying = {"weights", "gradients", "optimizer"} - {
            "weights" if kind == "parameters" else kind for kind in away
        }
        assert staying == parts[ROLLOUT].keys() & {"weights", "gradients", "optimizer"}
        assert "weights" in parts[HAND_OVER], "they are what is handed over"
        copied = [k for k in memory.host_bytes if k.startswith("offloaded")]
        assert len(copied) == len(away - {"gradients"}), "gradients are forgotten, not copied"
        kept = plan_case(llama(offloaded=frozenset(away), keeps_gradients=True)).memory.host_bytes
        assert ("offloaded gradients" in kept) == ("gradients" in away)


ENGINE_PARTS = ("rollout weights", "activations", "KV cache")


@pytest.mark.parametrize("phase", [START, ROLLOUT])
def test_engine_takes_its_whole_share(phase: str) -> None:
    small = plan_case(llama(gpu_memory_utilization=0.5)).memory
    parts = small.phase(phase).parts
    assert sum(parts[part] for part in ENGINE_PARTS) == 40 * GB
    # The same beside a larger share: vLLM takes that in any case.
    large = plan_case(llama(gpu_memory_utilization=0.94)).memory
    beside = small.phase(phase).total_bytes - 40 * GB
    share = math.ceil(0.94 * 80 * GB)
    assert large.phase(phase).total_bytes == share + beside
    assert large.phase(phase).lacking_bytes == share + beside - 75 * GB > 0
    assert large.phase(phase).surely_lacking_bytes == 0  # on a device of which nothing is reserved
    useful = small.kv_cache.useful_utilization
    at_useful = plan_case(llama(gpu_memory_utilization=useful - 1e-9)).memory
    assert at_useful.phase(ROLLOUT).lacking_bytes == 0
    assert at_useful.phase(ROLLOUT).total_bytes == pytest.approx(75 * GB, abs=200)


@pytest.mark.parametrize("offloads", [False, True])
def test_graphs_are_in_the_share_and_stay_unless_they_are_offloaded(offloads: bool) -> None:
    phases = dict(has_canary=True, exports=True)
    eager = plan_case(llama(**phases)).memory
    memory = plan_case(llama(**phases, graph_bytes=2 * GB, offloads_graphs=offloads)).memory
    awake, asleep = {FIRST_SWITCH, HAND_OVER}, {CANARY, LOG_PROBS, TRAIN, EXPORT}
    for phase in memory.phases:
        held = 2 * GB if phase.name in awake or (phase.name in asleep and not offloads) else 0
        assert phase.total_bytes == eager.phase(phase.name).total_bytes + held, phase.name
    assert memory.phase(ROLLOUT).parts["KV cache"] == eager.phase(ROLLOUT).parts["KV cache"] - 2e9
    assert memory.kv_cache.num_bytes == eager.kv_cache.num_bytes - 2 * GB
    assert memory.kv_cache.useful_utilization == eager.kv_cache.useful_utilization
    on_host = memory.host_bytes.get("offloaded CUDA graphs", 0)
    assert on_host == (8 * 2 * GB if offloads else 0)


def test_state_that_stays_at_start_is_beside_engine() -> None:
    """Before the first update the actor has no moments unless they are loaded."""
    case = llama()
    (weights, gradients, main, whole) = (
        max(held[part] for held in stage_state(case.actor, with_moments=moments))
        for part, moments in (
            ("weights", True), ("gradients", True), ("optimizer", False), ("optimizer", True)
        )
    )  # fmt: skip
    assert whole == 3 * main == pytest.approx(3 * weights / case.train.dp_size * 2)
    for away, loads, staying in (
        (("gradients", "optimizer", "parameters"), False, 0),
        (("gradients", "optimizer"), False, weights),
        ((), False, weights + gradients + main),
        ((), True, weights + gradients + whole),
    ):
        case = llama(away_at_start=frozenset(away), loads_checkpoint=loads)
        memory = plan_case(case).memory
        start = memory.phase(START)
        assert start.total_bytes == case.share_bytes + staying
        built = memory.phase(RESUME if loads else BUILD).parts
        assert sum(built.values()) == weights + gradients + (whole if loads else main)
        # Away or not at the start, it is there at the first hand-over.
        assert memory.phase(FIRST_SWITCH).parts["weights"] == weights


def test_phases_follow_order_of_run() -> None:
    least = [p.name for p in plan_case(llama()).memory.phases]
    assert least == [BUILD, START, FIRST_SWITCH, ROLLOUT, LOG_PROBS, TRAIN, HAND_OVER]
    more = plan_case(llama(has_canary=True, exports=True, loads_checkpoint=True)).memory
    assert [p.name for p in more.phases] == [RESUME, START, CANARY, *least[2:], EXPORT]
    canary, scoring = more.phase(CANARY).parts, more.phase(LOG_PROBS).parts
    assert 0 < canary["activations"] < scoring["activations"]
    bucket = more.phase(EXPORT).parts["bucket"]
    assert bucket == more.phase(HAND_OVER).parts["bucket"] == 2 * 512 * MIB
    assert more.host_bytes["file being exported"] == 8 * EXPORTED_FILE_BYTES


def test_communicators_are_counted_for_groups_of_several_ranks() -> None:
    assert communicators_of(TrainLayout(1), RolloutLayout(1, 1, False)) == {
        "Megatron": 0, "engine": 0, "hand-over": 0,
    }  # fmt: skip
    # The world, TP, PP, TP x PP; the engine's world and TP, torch's and vLLM's own of each.
    found = communicators_of(LLAMA, RolloutLayout(8, 4, False))
    assert found == {"Megatron": 4, "engine": 4, "hand-over": 1}
    memory = plan_case(llama(machine(communicator_bytes=100 * MB))).memory
    assert {phase.parts[NCCL] for phase in memory.phases} == {9 * 100 * MB}


def test_bytes_of_samples_equal_stored_and_sent_bytes() -> None:
    """The oracle is what each rank of four engines sends and receives, with equal lengths."""
    tokens, samples, world = 512, 16, 8  # of a TP group
    train = TrainLayout(world, tp_size=2, pp_size=2)
    sampled = {"sampled_tokens": samples * tokens, "sampled_tokens_in_all": 4 * samples * tokens}
    case = llama(train=train, tp_size=2, **sampled)
    centered = llama(train=train, tp_size=2, **sampled, num_top_tokens=128)
    engines = tuple(tuple(range(first, first + 2)) for first in range(0, world, 2))
    from_engines = Shares(tuple(np.split(np.arange(4 * samples), 4)), engines)
    wanted = Shares(tuple(np.split(np.arange(4 * samples), 2)), train.dp_ranks())
    for rank in range(world):
        moves = Moves.of(rank, 4 * samples, from_engines, wanted)
        sent, received = (
            9 * tokens * sum(map(len, of.values())) for of in (moves.outgoing, moves.incoming)
        )
        # Packed once for all receivers, which get copies.
        expected = (8 + 9) * samples * tokens + sent + received
        assert expected == sampled_bytes(case)
        of_candidates = 2 * samples * tokens + (sent + received) // 9
        assert candidate_bytes(centered) == 128 * 8 * of_candidates
    assert plan_case(case).memory.host_bytes["samples"] == 8 * sampled_bytes(case)
    of_node = plan_case(centered).memory.host_bytes
    assert of_node["candidates of samples"] == 8 * candidate_bytes(centered)
    assert "candidates of samples" not in plan_case(case).memory.host_bytes
    # Those of servers are received only, and joined.
    served = dataclasses.replace(centered, has_engines=False, has_servers=True)
    assert candidate_bytes(served) == 2 * 128 * 8 * (4 * samples * tokens // train.dp_size)
    of_node = plan_case(served).memory.host_bytes
    assert of_node["candidates of samples"] == 8 * candidate_bytes(served)


def test_bytes_of_experts_of_samples_equal_stored_and_sent_bytes() -> None:
    """DeepSeek-V3: 58 layers x 8 choices of a byte, and a byte that says whether they are known."""
    tokens = 64 * 8192  # of a TP group; there are 32
    sampled = {"sampled_tokens": tokens, "sampled_tokens_in_all": 32 * tokens}
    case = deepseek_v3_case(**sampled, replays_experts=True)
    planned = routed_bytes(case, kv_cache_tokens=1000)
    routes = Routes(np.zeros((1, 58, 8), dtype=np.uint8), np.ones(1, dtype=np.bool_))
    kept = tokens * (routes.ids.nbytes + routes.known.nbytes)
    received = 8 * tokens * (8 * 8 + 1)  # of 4 data-parallel ranks, of 8 layers
    assert planned["experts of samples"] == kept + 2 * kept + received
    assert planned["experts in vLLM"] == 1000 * 61 * 8
    in_plan = plan_case(case).memory.host_bytes
    assert in_plan["experts of samples"] == 8 * planned["experts of samples"]
    assert routed_bytes(deepseek_v3_case(), 1000) == {}


# ------------------------------------------------------------------------------------------- advice


# A case of Llama on TP2 PP4 in which one phase does not fit: the machine, and what changes.
LONG = {"recompute": Recompute(), "positions": 16384, "micro_batch_size": 2}
STAYING = {"offloaded": frozenset(), "positions": 64, "gradient_bytes": 2}
TIGHT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    TRAIN: ({"gpu_bytes": 30 * GB}, LONG),
    ROLLOUT: ({}, {"gpu_memory_utilization": 0.1}),
    HAND_OVER: ({"gpu_bytes": 31 * GB}, STAYING),
    HOST: ({"host_bytes": GB}, {"delta": True}),
}


def problem_of(outcome: Outcome, where: str) -> Problem:
    return next(problem for problem in outcome.problems if problem.where == where)


def assert_remedies_help(outcome: Outcome, where: str) -> None:
    problem = problem_of(outcome, where)
    left = [remedy.lacking_bytes for remedy in problem.remedies]
    assert left and left == sorted(left) and left[-1] < problem.lacking_bytes


@pytest.mark.parametrize("phase", list(TIGHT))
def test_every_remedy_reduces_lacking_bytes(phase: str) -> None:
    of_machine, changes = TIGHT[phase]
    outcome = plan_case(llama(machine(**of_machine), DEEP, 2, **changes))
    assert problem_of(outcome, phase).lacking_bytes > 0
    assert_remedies_help(outcome, phase)


def test_share_too_large_at_start_is_reported_with_fitting_share() -> None:
    stays = {"away_at_start": frozenset(), "offloaded": frozenset()}
    outcome = plan_case(llama(train=DEEP, tp_size=2, **stays, gpu_memory_utilization=0.9))
    best = problem_of(outcome, START).remedies[0]
    assert best.lacking_bytes == 0
    flag, value = best.flags.split()
    assert flag == "--rl-rollout-gpu-memory-utilization" and 0.5 < float(value) < 0.9
    mended = plan_case(llama(train=DEEP, tp_size=2, **stays, gpu_memory_utilization=float(value)))
    assert START not in {p.where for p in mended.problems}


def test_fitting_case_has_no_problem() -> None:
    assert plan_case(llama()).fits


# ------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize(("name", "gpu_gb"), [("qwen3-30b-a3b", 80), ("llama-3.1-8b", 24)])
def test_search_returns_fitting_layouts_in_order(name: str, gpu_gb: int) -> None:
    train, rollout = TrainLayout(16, tp_size=8, pp_size=2), RolloutLayout(16, 8, False)
    start = case_of(name, train, rollout, machine(gpu_bytes=gpu_gb * GB))
    found = search(start, STEP, top=5)
    assert 5 <= found.num_fitting < found.num_tried
    totals = [candidate.seconds.total for candidate in found.candidates]
    assert len(totals) == 5 and totals == sorted(totals)
    for candidate in found.candidates:
        outcome = plan_case(candidate.case)
        assert outcome.fits
        assert outcome.traffic.received.max() == candidate.received_bytes_max


def test_search_without_fitting_layout_returns_no_candidates() -> None:
    start = case_of("deepseek-v3", TrainLayout(8, tp_size=8, ep_size=8), RolloutLayout(8, 8, True))
    found = search(start, STEP, top=5)
    assert found.num_tried > 0 and found.num_fitting == 0 and found.candidates == ()


@pytest.mark.parametrize("num_layers", [1, 2, 27, 61])
def test_stages_hold_all_layers_and_none_is_empty(num_layers: int) -> None:
    possible = set()
    for pp_size in range(1, 65):
        stages = stages_for(num_layers, pp_size)
        if stages is None:
            continue
        possible.add(pp_size)
        held = [layer for stage in stages.layers for chunk in stage for layer in chunk]
        assert held == list(range(num_layers)) and all(chunk for s in stages.layers for chunk in s)
    assert {1, num_layers} <= possible
