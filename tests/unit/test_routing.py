"""Recorded choices of experts: storage, transport and replay in the router."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore_rl.batching.rows import MicroBatching, lay_out, tokens_in_rows
from mcore_rl.batching.train_batches import batch_of_tokens, split_micro_batches
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout, TopTokens
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.moe.routing import RoutedLayers, Routes, concatenated, load_of
from mcore_rl.moe.routing_capture import routes_of
from mcore_rl.moe.routing_replay import Choices, RoutingReplay, replay_obstacle
from mcore_rl.rollout.sample_store import SampleStore

LAYERS = RoutedLayers((1, 3), topk=2, num_experts=6)


def drawn(num_tokens: int, of: RoutedLayers = LAYERS, seed: int = 0) -> np.ndarray:
    """`[n, m, k]` different experts."""
    rng = np.random.default_rng(seed)
    scores = rng.random((num_tokens, len(of.layers), of.num_experts))
    return scores.argsort(axis=-1)[..., : of.topk].astype(of.dtype)


# --------------------------------------------------------------------------------- recorded choices


def test_choice_takes_one_byte_up_to_256_experts_and_two_above():
    layers = tuple(range(3, 61))  # DeepSeek-V3
    assert RoutedLayers(layers, 8, 256).bytes_a_token == 464 + 1
    assert RoutedLayers(layers, 8, 384).bytes_a_token == 928 + 1
    for num_experts in (256, 257):
        of = RoutedLayers((0,), 1, num_experts)
        assert torch.from_numpy(np.zeros(1, of.dtype)).dtype == of.torch_dtype
        assert np.array(num_experts - 1).astype(of.dtype) == num_experts - 1


@pytest.mark.parametrize("dtype", [np.int16, np.uint8])
def test_routes_cover_moe_layers_only(dtype):
    ids = drawn(5)
    recorded = np.full((5, 4, 2), 1, dtype=dtype)
    recorded[:, LAYERS.layers] = ids
    found = routes_of(recorded, LAYERS, 7)
    assert isinstance(found, Routes)
    assert np.array_equal(found.ids[:5], ids) and found.ids.dtype == np.uint8
    assert found.known.tolist() == [True] * 5 + [False] * 2


def test_token_without_a_layers_choice_is_unknown():
    recorded = np.zeros((3, 4, 2), dtype=np.int16)
    recorded[..., 1] = 1
    recorded[1, 3] = -1
    recorded[2, 0] = -1  # which has no experts
    found = routes_of(recorded, LAYERS, 3)
    assert isinstance(found, Routes) and found.known.tolist() == [True, False, True]
    nothing = routes_of(None, LAYERS, 3)
    assert isinstance(nothing, Routes) and nothing.known.tolist() == [False] * 3


@pytest.mark.parametrize(
    ("shape", "value", "words"),
    [
        ((4, 4, 2), 0, r"shape \[4, 4, 2\], expected \[3, more than 3, 2\]"),
        ((3, 3, 2), 0, r"shape \[3, 3, 2\], expected"),
        ((3, 4), 0, r"shape \[3, 4\], expected"),
        ((3, 4, 3), 0, "3 experts a token, expected 2"),
        ((3, 4, 2), 6, "expert 6, of which there are 6"),
    ],
)
def test_routes_of_another_model_are_refused(shape, value, words):
    found = routes_of(np.full(shape, value, dtype=np.uint8), LAYERS, 3)
    assert isinstance(found, str) and re.search(words, found)


def test_digest_depends_on_every_choice_and_on_known_tokens():
    ids, known = drawn(6), np.ones(6, dtype=np.bool_)
    digests = {Routes(ids, known).digest()}
    for token, layer in np.ndindex(6, 2):
        other = ids.copy()
        other[token, layer, 0] = (set(range(6)) - set(ids[token, layer].tolist())).pop()
        digests.add(Routes(other, known).digest())
    digests.add(Routes(ids, known & (np.arange(6) != 2)).digest())
    assert len(digests) == 14
    assert Routes(ids.copy(), known.copy()).digest() in digests


def test_load_counts_known_tokens():
    ids, known = drawn(40), np.random.default_rng(1).random(40) > 0.3
    expected = np.zeros((2, 6), dtype=np.int64)
    for token, layer, choice in np.ndindex(*ids.shape):
        expected[layer, ids[token, layer, choice]] += known[token]
    assert np.array_equal(load_of(Routes(ids, known), 6), expected)
    long = Routes(drawn(5000), np.ones(5000, dtype=np.bool_))
    counted = load_of(long, 6)
    assert (counted.sum(axis=1) == 1000 * 2).all()  # every fifth token


def test_joined_marks_the_last_token_of_each_sample_as_unknown():
    first, third = (Routes(drawn(n, seed=n), np.arange(n) != 1) for n in (3, 2))
    ids, known = concatenated([first, None, third], [4, 2, 3], LAYERS)
    assert known.tolist() == [True, False, True, False, False, False, True, False, False]
    assert np.array_equal(ids[:3], first.ids) and np.array_equal(ids[6:8], third.ids)


# --------------------------------------------------------------------------------------- the keeper


@pytest.fixture
def sample_store() -> Iterator[SampleStore]:
    """Of rank 0 of 4: engines of TP2, two pipeline stages with one layer with experts each."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layers = (((0, 1),), ((2, 3),))
    yield SampleStore(
        TrainLayout(4, tp_size=2, pp_size=2), RolloutLayout(4, 2, True), layers, LAYERS
    )
    dist.destroy_process_group()


def sample_of(routes: Routes | None, *, first: int = 0) -> ScoredRollout:
    """Three tokens of a prompt, two of a response."""
    prompt = Prompt(0, "", "", np.arange(first, first + 3, dtype=np.int32))
    tokens = np.arange(2, dtype=np.int32) + 70_000
    log_probs = np.array([-0.5, -0.25], dtype=np.float32)
    return ScoredRollout(Rollout(prompt, 0, "", tokens, log_probs, "stop", 1, routes=routes), 1.0)


def test_samples_stay_with_those_who_sampled(sample_store: SampleStore) -> None:
    assert (
        sample_store.of_stage().layers == (1,)
        and sample_store.of_stage(1).layers == LAYERS.layers[1:]
    )
    routes = [Routes(drawn(4, seed=n), np.ones(4, dtype=np.bool_)) for n in range(2)]
    assert sample_store.add([sample_of(routes[0]), sample_of(None)]) == 0
    assert sample_store.add([sample_of(routes[1])]) == 2
    table = sample_store.table(1, [5, 6])
    assert (table.homes.tolist(), table.numbers.tolist()) == ([0, 0], [1, 2])
    assert (table.draws.tolist(), table.lengths.tolist()) == ([5, 6], [5, 5])
    assert np.array_equal(sample_store.load(), sum(load_of(each, 6) for each in routes))
    before = sample_store.digest()
    sample_store.clear()
    assert sample_store.digest() != before and not sample_store.load().any()


@pytest.mark.parametrize("stage", [0, 1, None])
def test_tokens_are_the_same_after_their_way(sample_store: SampleStore, stage: int | None) -> None:
    routes = Routes(drawn(4), np.array([True, False, True, True]))
    data = sample_store.pack(sample_of(routes, first=300), stage)
    assert len(data) == 5 * sample_store.bytes_per_token(stage)
    # Where it lies in a message is all the same.
    found = sample_store.unpack(np.concatenate([data[:1], data])[1:], 5, stage)
    assert found.token_ids.tolist() == [300, 301, 302, 70_000, 70_001]
    assert found.is_generated.tolist() == [False] * 3 + [True] * 2
    assert found.log_probs.tolist() == [0.0, 0.0, 0.0, -0.5, -0.25]
    if stage is None:
        assert found.routes is None
        return
    of_stage = routes.ids[:, [stage]] if stage == 0 else routes.ids[:, 1:]
    assert found.routes is not None
    assert np.array_equal(found.routes.ids, of_stage)
    assert np.array_equal(found.routes.known, routes.known)


@pytest.mark.parametrize("is_empty", [False, True])
def test_candidates_are_the_same_after_their_way(sample_store: SampleStore, is_empty: bool) -> None:
    sample_store.num_top = 3
    sample, num_response = sample_of(Routes(drawn(4), np.ones(4, dtype=np.bool_))), 2
    rng = np.random.default_rng(2)
    top = TopTokens(
        rng.integers(0, 130_000, (2, 3)).astype(np.int32), -rng.random((2, 3)).astype(np.float32)
    )
    if is_empty:  # a response that failed without one
        nothing = np.empty(0, np.int32)
        rollout = dataclasses.replace(
            sample.rollout,
            response_token_ids=nothing,
            rollout_log_probs=nothing.astype(np.float32),
            routes=None,
        )
        num_response, top = 0, TopTokens(np.empty((0, 3)), np.empty((0, 3)))
    else:
        rollout = dataclasses.replace(sample.rollout, top_tokens=top)
    data = sample_store.pack(ScoredRollout(rollout, 1.0), 0)
    length = 3 + num_response
    assert len(data) == length * sample_store.bytes_per_token(0) + num_response * 3 * 8
    found = sample_store.unpack(np.concatenate([data[:1], data])[1:], length, 0)
    assert found.token_ids.tolist() == [0, 1, 2, 70_000, 70_001][:length]
    assert found.routes is not None and found.routes.known.all() == (not is_empty)
    assert found.top_tokens is not None
    assert np.array_equal(found.top_tokens.ids, top.ids)
    assert np.array_equal(found.top_tokens.log_probs, top.log_probs)
    assert found.top_tokens.ids.dtype == np.int32
    assert found.top_tokens.log_probs.dtype == np.float32


def test_sample_without_its_candidates_is_an_error(sample_store: SampleStore) -> None:
    sample_store.num_top = 3
    with pytest.raises(AssertionError, match="than 3 at each position"):
        sample_store.pack(sample_of(None), None)
    failed = dataclasses.replace(sample_of(None).rollout, failure="no server")
    sample_store.pack(ScoredRollout(failed, 1.0), None)


def test_ranks_of_an_engine_that_sampled_otherwise_are_an_error(sample_store: SampleStore) -> None:
    sample_store.require_agreement([b"a", b"a", b"b", b"b"])
    with pytest.raises(RuntimeError, match="ranks 2 and 3 of one engine sampled different tokens"):
        sample_store.require_agreement([b"a", b"a", b"b", b"c"])


# ------------------------------------------------------------------------------ layout in rows


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 64])
def test_rows_hold_every_token_once(max_tokens, cp_size):
    batch = batch_of_tokens([[5, 6, 7], [8, 9], [10, 11, 12, 13]])
    batching = MicroBatching(max_tokens=max_tokens, multiple_of=2, cp_size=cp_size)
    for part in split_micro_batches(batch):
        found = []
        for cp_rank in range(cp_size):
            rows = lay_out(part, batching, None, cp_rank)
            tokens = tokens_in_rows(rows, part.num_tokens, cp_rank)
            is_token = tokens >= 0
            assert torch.equal(rows.token_ids[is_token], part.token_ids[tokens[is_token]])
            found += tokens[is_token].tolist()
        assert sorted(found) == list(range(part.num_tokens))


# --------------------------------------------------------------------------------------- the replay


class Router(torch.nn.Module):
    """Calls its replay as Megatron's router does."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number, self.router_replay = layer_number, None

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def top(scores, topk, num_groups=None, group_topk=None):
            return scores.topk(topk, dim=1)

        return self.router_replay.get_replay_topk(scores, 2, None, None, top)


def chunk_of(*layers: SimpleNamespace, **more: SimpleNamespace) -> SimpleNamespace:
    decoder = SimpleNamespace(layers=layers)
    return SimpleNamespace(decoder=decoder, parameters=lambda: iter([torch.zeros(1)]), **more)


def layer_of(router: Router) -> SimpleNamespace:
    return SimpleNamespace(layer_number=router.layer_number, mlp=SimpleNamespace(router=router))


@pytest.fixture
def replay() -> tuple[RoutingReplay, Router, Router]:
    """The replay of a chunk with a dense layer and two MoE layers, and their routers."""
    dense = SimpleNamespace(layer_number=1, mlp=SimpleNamespace())
    routers = Router(2), Router(4)
    return RoutingReplay([chunk_of(dense, *map(layer_of, routers))], LAYERS), *routers


SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.3, 0.2, 0.0], [0.6, 0.1, 0.2, 0.8, 0.3, 0.4]])


def choices(*ids: list[int], known: tuple[bool, bool] = (True, True)) -> Choices:
    """The same choices for both layers, two tokens."""
    stacked = torch.tensor(ids, dtype=torch.uint8)[:, None].expand(2, 2, 2)
    return Choices(stacked, torch.tensor(known))


def test_router_of_an_mtp_layer_is_not_replayed():
    """Its layer number is 1, too."""
    of_mtp, router = Router(1), Router(1)
    own = of_mtp.router_replay = SimpleNamespace()
    mtp = SimpleNamespace(layers=[layer_of(of_mtp)])
    replay = RoutingReplay([chunk_of(layer_of(router), mtp=mtp)], LAYERS)
    assert replay.routed.layers == (0,) and router.router_replay is not None
    assert of_mtp.router_replay is own


def test_replayed_choices_use_the_routers_scores(replay):
    replay, router, _ = replay
    scores = SCORES.clone().requires_grad_()
    with replay.pass_over_samples(with_gradients=False), replay.using(choices([4, 5], [1, 2])):
        values, ids = router(scores)
    assert ids.tolist() == [[4, 5], [2, 1]]  # in the order of the scores
    assert torch.equal(values, SCORES.gather(1, ids))
    values.sum().backward()
    assert scores.grad.nonzero().tolist() == [[0, 4], [0, 5], [1, 1], [1, 2]]


def test_unknown_token_keeps_the_routers_choice_and_is_not_compared(replay):
    replay, router, _ = replay
    given = choices([4, 1], [1, 2], known=(True, False))
    with replay.pass_over_samples(with_gradients=False), replay.using(given):
        _, ids = router(SCORES)
    assert ids.tolist() == [[1, 4], [3, 0]]
    assert replay.differing.tolist() == [1, 0] and replay.compared.tolist() == [2, 0]


def test_routers_choose_outside_a_pass(replay):
    replay, *routers = replay
    for router in routers:
        assert router(SCORES)[1].tolist() == [[1, 2], [3, 0]]
    assert replay.compared.sum() == 0


def test_replay_of_the_routers_own_choices_is_bit_exact(replay):
    replay, router, _ = replay
    scores = torch.rand(2, 6, generator=torch.Generator().manual_seed(0))
    values, ids = router(scores)
    turned = Choices(ids.flip(1)[:, None].expand(2, 2, 2), torch.ones(2, dtype=torch.bool))
    with replay.pass_over_samples(with_gradients=False), replay.using(turned):
        again = router(scores)
    assert torch.equal(again[0], values) and torch.equal(again[1], ids)


def test_recomputation_replays_the_choices_of_its_forward_pass(replay):
    """As in a pipeline, two forward passes precede the first backward pass."""
    replay, router, other = replay
    given = [choices([0, 1], [0, 1]), choices([2, 3], [2, 3]), choices([4, 5], [4, 5])]

    def forward(number: int) -> None:
        with replay.using(given[number]), torch.no_grad():
            router(SCORES)
        with replay.using(given[number]):
            other(SCORES)  # a layer that is not recomputed

    def recomputed() -> set[int]:
        return set(router(SCORES)[1].flatten().tolist())

    with replay.pass_over_samples(with_gradients=True):
        forward(0)
        forward(1)
        assert recomputed() == {0, 1}
        forward(2)
        assert [recomputed(), recomputed()] == [{2, 3}, {4, 5}]


def test_wrong_number_of_recomputations_is_an_error(replay):
    replay, router, _ = replay
    with (
        pytest.raises(RuntimeError, match="router of layer 1 runs again in the backward pass"),
        replay.pass_over_samples(with_gradients=True),
    ):
        router(SCORES)
    with (
        pytest.raises(RuntimeError, match="1 choices of experts were kept and not used"),
        replay.pass_over_samples(with_gradients=True),
        replay.using(choices([0, 1], [0, 1])),
        torch.no_grad(),
    ):
        router(SCORES)
    assert router(SCORES)[1].tolist() == [[1, 2], [3, 0]]  # nothing is kept


def test_recording_has_the_choices_of_each_layer(replay):
    replay, router, other = replay
    found: dict[int, torch.Tensor] = {}
    with replay.recording(found):
        router(SCORES)
        other(SCORES.flip(1))
    assert {column: ids.tolist() for column, ids in found.items()} == {
        0: [[1, 2], [3, 0]],
        1: [[4, 3], [2, 5]],
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"moe_router_fusion": True}, "--moe-router-fusion "),
        ({"enable_cuda_graph": True}, "--enable-cuda-graph "),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local "),
    ],
)
def test_flags_that_bypass_the_router_are_named(values, words):
    assert words in replay_obstacle(values)
    assert not replay_obstacle({"moe_router_fusion": False, "cuda_graph_impl": "none"})
