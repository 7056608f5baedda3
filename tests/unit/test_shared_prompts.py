"""Prompts shared by samples: the layout of rows, what attention sees, and the conditions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.batching import attention_batches
from mcore_rl.batching.assignment import Cuts, Prompts, plan_step
from mcore_rl.batching.attention_batches import similar_segments
from mcore_rl.batching.rows import MicroBatching, ModelRows, lay_out, prefixes_of, set_prefixes
from mcore_rl.batching.shared_prompts import obstacle, shares_prompts
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.train_batches import batch_of_tokens, split_micro_batches
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout, TrainBatch
from mcore_rl.common.errors import UsageError
from mcore_rl.patches.megatron.local_layers import SDPACoreAttention
from tests.held import table_of, train_batch

SHARED = MicroBatching(max_tokens=200, share_prompts=True)
# (tokens of the prompt, of each response)
Groups = list[tuple[int, list[int]]]
groups_of_samples = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=5)),
    min_size=1,
    max_size=5,
)


def scored_samples(groups: Groups) -> list[ScoredRollout]:
    """Return samples of random tokens."""
    rng = np.random.default_rng(1)
    scored = []
    for index, (num_prompt, responses) in enumerate(groups):
        prompt = Prompt(index, "", "", rng.integers(1, 99, num_prompt))
        for number, length in enumerate(responses):
            rollout = Rollout(
                prompt=prompt,
                sample_index=number,
                text="",
                response_token_ids=rng.integers(1, 99, length).astype(np.int32),
                rollout_log_probs=np.zeros(length, dtype=np.float32),
                finish_reason="stop",
                weight_version=0,
            )
            scored.append(ScoredRollout(rollout, reward=0.0))
    return scored


def in_one_row(groups: Groups) -> TrainBatch:
    scored = scored_samples(groups)
    return train_batch(scored, ((tuple(range(len(scored))),),))


def tokens_of_samples(batch: TrainBatch) -> list[torch.Tensor]:
    return list(torch.arange(batch.num_tokens).split(batch.lengths.tolist()))


@given(groups_of_samples, st.sampled_from([1, 4]))
def test_row_contains_a_prompt_once_and_all_tokens(groups: Groups, multiple_of: int) -> None:
    batch = in_one_row(groups)
    batching = MicroBatching(max_tokens=500, share_prompts=True, multiple_of=multiple_of)
    rows = lay_out(batch, batching, None)
    needed = sum(
        num_prompt - 1 + sum(1 + length for length in responses)
        if len(responses) > 1
        else num_prompt + responses[0]
        for num_prompt, responses in merged(groups, batch)
    )
    assert rows.token_ids.shape[1] == -(-needed // multiple_of) * multiple_of
    assert torch.equal(rows.token_ids.flatten()[rows.places], batch.token_ids)
    for tokens in tokens_of_samples(batch):
        places = rows.places[tokens]
        assert rows.position_ids.flatten()[places].tolist() == list(range(len(tokens)))
        # The target of a token is the next token of its sample.
        assert torch.equal(rows.target_ids.flatten()[places[:-1]], batch.token_ids[tokens[1:]])
    assert rows.longest >= int(batch.lengths.max())


def merged(groups: Groups, batch: TrainBatch) -> Groups:
    """Merge neighbouring groups whose prompts have the same tokens."""
    found: Groups = []
    last = None
    samples = iter(tokens_of_samples(batch))
    for num_prompt, responses in groups:
        first = [next(samples) for _ in responses][0]
        prompt = batch.token_ids[first[:num_prompt]].tolist()
        if prompt == last and num_prompt > 1:
            found[-1] = (num_prompt, found[-1][1] + responses)
        else:
            found.append((num_prompt, responses))
        last = prompt
    return found


@pytest.mark.parametrize("most_of_a_mask", [2**22, 0], ids=["masks", "causal"])
@given(groups=groups_of_samples)
def test_attention_sees_only_tokens_of_its_sample(groups: Groups, most_of_a_mask: int) -> None:
    batch = in_one_row(groups)
    rows = lay_out(batch, MicroBatching(max_tokens=500, share_prompts=True, multiple_of=4), None)
    assert rows.cu_seqlens is not None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention_batches, "MOST_OF_A_MASK", most_of_a_mask)
        seen = keys_of_queries(rows)
    for tokens in tokens_of_samples(batch):
        places = rows.places[tokens].tolist()
        for at, place in enumerate(places):
            assert seen[place] == places[: at + 1]


def keys_of_queries(rows: ModelRows) -> dict[int, list[int]]:
    """Return, for each position of the row, the positions that it attends to, in the order of the
    keys."""
    assert rows.cu_seqlens is not None
    seen: dict[int, list[int]] = {}
    for batch in similar_segments(rows.cu_seqlens, rows.prefix_of):
        size, num_keys = batch.keys.shape
        visible = batch.visible
        if visible is None:
            assert batch.queries.shape == batch.keys.shape
            visible = torch.ones(num_keys, num_keys, dtype=torch.bool).tril()[None, None]
            visible = visible.expand(size, 1, -1, -1)
        for segment, at in batch.is_query.nonzero().tolist():
            place = int(batch.queries[segment, at])
            assert place not in seen, "computed twice"
            seen[place] = batch.keys[segment][visible[segment, 0, at]].tolist()
    assert sorted(seen) == list(range(rows.token_ids.shape[1]))
    return seen


def test_segments_of_different_lengths_are_batched_separately() -> None:
    bounds = torch.tensor([0, 100, 190, 290, 300, 303]).int()
    sizes = {tuple(batch.keys.shape) for batch in similar_segments(bounds, None)}
    assert sizes == {(3, 100), (2, 10)}
    assert all(batch.visible is None for batch in similar_segments(bounds, None))


def core_attention(*, window: int | None = None, sinks: list[float] | None = None) -> Any:
    """Build the attention of the first layer, with a window, and with sinks for its heads."""
    config = SimpleNamespace(
        context_parallel_size=1,
        attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=2,
        softmax_type="vanilla" if sinks is None else "learnable",
        num_attention_heads=len(sinks or ()),
        params_dtype=torch.float64,
        perform_initialization=False,
    )
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    attention = SDPACoreAttention(config, 1, None, "self", pg_collection=groups)
    if sinks is not None:
        attention.softmax_offset.data.copy_(torch.tensor(sinks))
    return attention


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_windows_and_sinks_equal_transformers(window: int | None, num_samples: int) -> None:
    """For packed and unpacked samples, with the gradients of all inputs."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    attention = core_attention(window=window, sinks=[0.5, -1.0, 2.0, 1.0])
    length, generator = 11, torch.Generator().manual_seed(6)
    query, key, value = (
        torch.randn(num_samples, heads, length, 8, generator=generator).double().requires_grad_()
        for heads in (4, 2, 2)
    )
    weight = torch.randn(num_samples, length, 32, generator=generator).double()
    inputs = (query, key, value, attention.softmax_offset)

    def gradients(outputs: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad((outputs * weight).sum(), inputs))

    place = torch.arange(length)
    distance = place[:, None] - place
    hidden = (distance < 0) | (distance >= (window or length))
    module = SimpleNamespace(num_key_value_groups=2, sinks=attention.softmax_offset, training=False)
    mask = torch.zeros(length, length).double().masked_fill(hidden, -torch.inf)
    expected = eager_attention_forward(module, query, key, value, mask, 8**-0.5)[0].flatten(2)
    packed = attention(
        *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)),
        packed_seq_params=SimpleNamespace(
            cu_seqlens_q=torch.arange(num_samples + 1).int() * length
        ),
    ).unflatten(0, (num_samples, length))
    unpacked = attention(*(x.permute(2, 0, 1, 3) for x in (query, key, value))).transpose(0, 1)
    right = gradients(expected)
    for found in (packed, unpacked):
        torch.testing.assert_close(found, expected)
        for got, wanted in zip(gradients(found), right, strict=True):
            torch.testing.assert_close(got, wanted)
    assert float(right[-1].abs().min()) > 0.01  # gradients of the sinks


@pytest.mark.parametrize("own", [{}, {"window": 4, "sinks": [0.5, -1.0]}], ids=["plain", "gpt_oss"])
@pytest.mark.parametrize("num_groups", [1, 2], ids=["mha", "gqa"])
def test_outputs_and_gradients_equal_those_of_separate_samples(
    num_groups: int, own: dict[str, Any]
) -> None:
    batch = in_one_row([(7, [3, 0, 11]), (1, [4]), (40, [2, 2, 30]), (5, [6, 6])])
    rows = lay_out(batch, MicroBatching(max_tokens=500, share_prompts=True, multiple_of=8), None)
    assert rows.cu_seqlens is not None and rows.prefix_of is not None
    attention = core_attention(**own)
    generator = torch.Generator().manual_seed(2)
    heads = {"query": 2, "key": 2 // num_groups, "value": 2 // num_groups}
    sizes = {"query": 8, "key": 8, "value": 6}
    row = {
        name: torch.randn(
            rows.token_ids.shape[1], heads[name], sizes[name], generator=generator
        ).double()
        for name in heads
    }
    weight = torch.randn(batch.num_tokens, 2 * 6, generator=generator).double()

    def gradients(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        of = [*inputs.values(), *attention.parameters()]
        return list(torch.autograd.grad((outputs * weight).sum(), of))

    together = {name: x.clone().requires_grad_() for name, x in row.items()}
    set_prefixes(rows.cu_seqlens, rows.prefix_of)
    packed = attention(
        *together.values(), packed_seq_params=SimpleNamespace(cu_seqlens_q=rows.cu_seqlens)
    )[rows.places]
    alone = {name: x.clone().requires_grad_() for name, x in row.items()}
    one_by_one = torch.cat(
        [
            attention(*(x[rows.places[tokens], None] for x in alone.values())).squeeze(1)
            for tokens in tokens_of_samples(batch)
        ]
    )
    torch.testing.assert_close(packed, one_by_one)
    for found, expected in zip(
        gradients(packed, together), gradients(one_by_one, alone), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_shared_gradients_are_summed_in_float32_without_16_bit_products() -> None:
    batch = in_one_row([(30, [2] * 16)])
    rows = lay_out(batch, SHARED, None)
    assert rows.cu_seqlens is not None and rows.prefix_of is not None
    set_prefixes(rows.cu_seqlens, rows.prefix_of)
    packed = SimpleNamespace(cu_seqlens_q=rows.cu_seqlens)
    attention = core_attention()
    generator = torch.Generator().manual_seed(4)
    exact = [torch.randn(rows.token_ids.shape[1], 2, 8, generator=generator) for _ in range(3)]
    narrow = [x.bfloat16().requires_grad_() for x in exact]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    attention(*wide, packed_seq_params=packed).sum().backward()
    attention.widened = frozenset({torch.bfloat16})
    found = attention(*narrow, packed_seq_params=packed)
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    for got, expected in zip(narrow, wide, strict=True):
        assert got.grad is not None and expected.grad is not None
        # The sum over 16 samples is rounded once.
        torch.testing.assert_close(got.grad.double(), expected.grad, rtol=2.0**-8, atol=1e-5)


@settings(deadline=None)
@given(
    groups_of_samples, st.integers(1, 4), st.sampled_from([22, 40, 200]), st.sampled_from([1, 2])
)
def test_plan_assigns_every_sample_once_within_the_budget(
    groups: Groups, dp_size: int, max_tokens: int, count_multiple_of: int
) -> None:
    scored = scored_samples(groups)
    lengths = table_of(scored).lengths
    batching = MicroBatching(
        max_tokens=max_tokens, share_prompts=True, count_multiple_of=count_multiple_of
    )
    plan = plan_step(
        lengths,
        num_mini_batches=1,
        dp_size=dp_size,
        batching=batching,
        prompts=Prompts.of(table_of(scored)),
    )
    assert sorted(samples_of(plan)) == list(range(len(scored)))
    counts = {len(mini_batch) for cuts in plan for mini_batch in cuts}
    assert len(counts) == 1 and counts.pop() % count_multiple_of == 0
    for cuts in plan:
        for micro_batch in split_micro_batches(train_batch(scored, cuts)):
            assert lay_out(micro_batch, batching, None).token_ids.shape[1] <= max_tokens


def samples_of(plan: list[Cuts]) -> list[int]:
    return [i for cuts in plan for mini_batch in cuts for bin_ in mini_batch for i in bin_]


def test_samples_of_a_prompt_stay_together_and_ranks_are_balanced() -> None:
    rng = np.random.default_rng(3)
    groups = [(24, rng.integers(2, 9, 8).tolist()) for _ in range(16)]
    scored = scored_samples(groups)
    lengths = table_of(scored).lengths
    batching = MicroBatching(max_tokens=2048, share_prompts=True)
    plan = plan_step(
        lengths,
        num_mini_batches=1,
        dp_size=2,
        batching=batching,
        prompts=Prompts.of(table_of(scored)),
    )
    in_rows = []
    for cuts in plan:
        ((bin_,),) = cuts
        assert len(bin_) == 64 and {i // 8 for i in bin_} == {bin_[8 * k] // 8 for k in range(8)}
        in_rows.append(lay_out(train_batch(scored, cuts), batching, None).token_ids.shape[1])
    assert max(in_rows) / min(in_rows) < 1.05
    # 24 + 8 x 5.5 tokens per prompt instead of 8 x 29.5.
    assert sum(in_rows) < 0.35 * lengths.sum()


def test_large_group_is_cut_over_all_ranks() -> None:
    scored = scored_samples([(10, [20] * 16)])
    lengths = table_of(scored).lengths
    plan = plan_step(
        lengths,
        num_mini_batches=1,
        dp_size=2,
        batching=MicroBatching(max_tokens=4096, share_prompts=True),
        prompts=Prompts.of(table_of(scored)),
    )
    assert min(sum(map(len, cuts[0])) for cuts in plan) >= 7


def test_plan_ignores_prompts_without_sharing() -> None:
    scored = scored_samples([(9, [3, 5]), (4, [8, 1, 7])])
    lengths = table_of(scored).lengths
    plain = MicroBatching(max_tokens=30)
    with_prompts, without = (
        plan_step(lengths, num_mini_batches=1, dp_size=2, batching=plain, prompts=prompts)
        for prompts in (Prompts.of(table_of(scored)), None)
    )
    assert with_prompts == without
    rows = lay_out(train_batch(scored, ((tuple(range(5)),),)), plain, None)
    assert rows.prefix_of is None and rows.token_ids.shape[1] == lengths.sum()


def test_prompts_are_identified_by_draws() -> None:
    twos = np.full(4, 2)
    table = SampleTable.of_lengths(twos, twos, draws=np.array([4, 4, 3, 4]))
    found = Prompts.of(table)
    assert found.ids.tolist() == [0, 0, 1, 2] and found.lengths.tolist() == [2] * 4
    assert Prompts.of(table.take([])).ids.tolist() == []


def test_sequences_without_prompts_are_not_shared() -> None:
    rows = lay_out(batch_of_tokens([[1, 2, 3]] * 2), SHARED, None)
    assert rows.prefix_of is None and rows.token_ids.shape[1] == 6


def test_prefixes_are_attached_to_their_bounds() -> None:
    bounds = torch.tensor([0, 3, 5])
    assert prefixes_of(bounds) is None
    set_prefixes(bounds, torch.tensor([0, 0]))
    found = prefixes_of(bounds)
    assert found is not None and found.tolist() == [0, 0]


POSSIBLE = {"transformer_impl": "local", "hidden_dropout": 0.0, "attention_dropout": 0.0}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl transformer_engine"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
        ({"hidden_dropout": 0.1}, "--hidden-dropout 0.1"),
        ({"attention_dropout": 0.2}, "--attention-dropout 0.2"),
        ({"moe_z_loss_coeff": 1e-3}, "--moe-z-loss-coeff 0.001"),
        ({"moe_expert_capacity_factor": 1.5}, "--moe-expert-capacity-factor 1.5"),
        ({"moe_aux_loss_coeff": 0.01}, "--moe-aux-loss-coeff 0.01"),
        ({"moe_aux_loss_coeff": [0.0, 0.02]}, "--moe-aux-loss-coeff 0.02"),
        ({"moe_router_enable_expert_bias": True}, "--moe-router-bias-update-rate 0.001"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers 1"),
        (
            {"experimental_attention_variant": "gated_delta_net", "distributed_backend": "nccl"},
            "--experimental-attention-variant gated_delta_net",
        ),
        ({"mamba_num_heads": 64, "distributed_backend": "nccl"}, "--mamba-num-heads 64"),
    ],
)
def test_obstacle_names_the_flag(values: dict[str, object], named: str) -> None:
    assert obstacle(POSSIBLE, 512) == ""
    assert obstacle(POSSIBLE | values, 512).startswith(named)
    assert not shares_prompts("auto", POSSIBLE | values, 512)
    with pytest.raises(UsageError, match=f"--rl-share-prompts on .*{named}.*; drop it"):
        shares_prompts("on", POSSIBLE | values, 512)


def test_sharing_needs_packed_samples_and_constant_expert_bias() -> None:
    kept = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
    assert shares_prompts("auto", POSSIBLE | kept, 512)
    assert not shares_prompts("off", POSSIBLE, 512)
    assert not shares_prompts("auto", POSSIBLE, 0)
    with pytest.raises(UsageError, match="--rl-max-tokens-per-microbatch 0"):
        shares_prompts("on", POSSIBLE, 0)
