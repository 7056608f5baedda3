"""Flags that balance experts, and combinations that are refused."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import WITHOUT_CUDA
from mcore_rl.job.facts import Refusals, Source
from mcore_rl.job.resolver import examine
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.model.config_json import read_model_shape
from mcore_rl.moe.balance import (
    balances,
    balancing_flag,
    check_balancing,
    check_bias_dtypes,
    losses,
    moves_biases,
)
from tests.model_shapes import CONFIGS

BIASES = {"num_experts": 8, "moe_router_enable_expert_bias": True}


def by_losses(*kinds: str, coefficient: object = 1e-2, **more: object) -> dict[str, object]:
    found = {"moe_router_load_balancing_type": list(kinds), "moe_aux_loss_coeff": coefficient}
    return {"num_experts": 8, **found, **more}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ()),
        (by_losses("none"), ()),
        (by_losses("aux_loss"), ("aux_loss",)),
        (by_losses("aux_loss") | {"num_experts": None}, ()),
        (by_losses("aux_loss", "seq_aux_loss", coefficient=[0.0, 0.1]), ("seq_aux_loss",)),
        (by_losses("aux_loss", "global_aux_loss"), ("aux_loss", "global_aux_loss")),
        (by_losses("seq_aux_loss", coefficient=0.0), ()),
        (by_losses() | {"moe_router_load_balancing_type": "seq_aux_loss"}, ("seq_aux_loss",)),
    ],
)
def test_losses_count_with_a_coefficient(values: dict, expected: tuple[str, ...]) -> None:
    assert losses(values) == expected
    assert balances(values) == bool(expected)


def test_biases_move_with_a_rate() -> None:
    assert moves_biases(BIASES) and balances(BIASES)  # by Megatron's default
    assert balancing_flag(BIASES) == "--moe-router-bias-update-rate 0.001"
    assert not moves_biases(BIASES | {"moe_router_bias_update_rate": 0.0})
    assert not moves_biases(BIASES | {"moe_router_enable_expert_bias": False})


@pytest.mark.parametrize(
    ("values", "max_tokens", "words"),
    [
        (
            by_losses("seq_aux_loss"),
            256,
            "--moe-router-load-balancing-type seq_aux_loss takes a row for a sample, and "
            "--rl-max-tokens-per-microbatch 256 packs several into one; drop one of the two",
        ),
        (
            by_losses("aux_loss", "seq_aux_loss", micro_batch_size=4),
            0,
            "which --micro-batch-size 4 makes different; give --micro-batch-size 1",
        ),
        (
            BIASES | {"mtp_num_layers": 1},
            0,
            "--mtp-num-layers 1 counts padding in the load of experts, which "
            "--moe-router-bias-update-rate 0.001 evens out; drop it, or give",
        ),
        (
            by_losses("aux_loss", cuda_graph_impl="local"),
            0,
            "--cuda-graph-impl local counts padding in the load of experts, which "
            "--moe-router-load-balancing-type aux_loss evens out",
        ),
    ],
)
def test_flags_that_miscount_expert_load_are_refused(
    values: dict, max_tokens: int, words: str
) -> None:
    with pytest.raises(UsageError) as error:
        check_balancing(values, max_tokens)
    assert words in str(error.value)


def test_flags_that_count_expert_load_correctly_are_accepted() -> None:
    check_balancing(by_losses("seq_aux_loss", micro_batch_size=1, cuda_graph_impl="none"), 0)
    check_balancing(by_losses("aux_loss", "global_aux_loss", micro_batch_size=4), 256)
    check_balancing(BIASES, 256)
    check_balancing({"mtp_num_layers": 1, "cuda_graph_impl": "local"}, 256)  # nothing balances


def test_expert_biases_in_low_precision_are_refused() -> None:
    dtypes = {"a.bias": "float32", "b.bias": "bfloat16"}
    with pytest.raises(UsageError, match=r"^--moe-router-bias-update-rate 0.001 .* b.bias in here"):
        check_bias_dtypes(BIASES, dtypes, "here")
    check_bias_dtypes(BIASES, {"a.bias": "float32"}, "here")
    check_bias_dtypes(BIASES | {"moe_router_bias_update_rate": 0.0}, dtypes, "here")


@pytest.mark.parametrize("num_experts", [3, 4])  # 4, as there are positions
def test_padding_is_not_counted_in_expert_load(num_experts: int) -> None:
    megatron_adapter.prepare()
    from megatron.core.transformer.moe.router import TopKRouter

    router = TopKRouter.__new__(TopKRouter)
    torch.nn.Module.__init__(router)
    router.enable_expert_bias = True
    router.local_tokens_per_expert = torch.zeros(num_experts)
    chosen = torch.zeros(4, num_experts, dtype=torch.bool)
    chosen[:, 0] = chosen[3, 2] = True
    router._apply_expert_bias(chosen, padding_mask=torch.tensor([False, True, False, False]))
    assert router.local_tokens_per_expert.tolist() == [3.0, 0.0, 1.0, 0.0][:num_experts]
    router._apply_expert_bias(chosen)
    assert router.local_tokens_per_expert.tolist() == [7.0, 0.0, 2.0, 0.0][:num_experts]
    with torch.no_grad():
        router._apply_expert_bias(chosen)
    assert router.local_tokens_per_expert.tolist() == [7.0, 0.0, 2.0, 0.0][:num_experts]


@pytest.mark.parametrize("critic", ["qwen3-30b-a3b", "qwen3-0.6b"])
def test_balancing_of_the_critics_own_experts_is_checked(critic: str) -> None:
    """The actor is dense, so that nothing of it balances."""
    names = {"--rl-hf-checkpoint": "qwen3-0.6b", "--rl-critic-init": critic}
    errors: list[UsageError] = []

    class Collected(Refusals):
        def refuse(self, error: UsageError) -> None:
            errors.append(error)

    source = Source(
        tokens="--rl-hf-checkpoint actor --rl-critic-init critic --rl-algorithm ppo "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 "
        "--rl-max-tokens-per-microbatch 2048".split(),
        platform=WITHOUT_CUDA,
        world_size=1,
        read_shape=lambda folder, flag: read_model_shape(CONFIGS / f"{names[flag]}.json"),
        has_files=False,
        is_here=False,
    )
    examine(source, Collected())
    found = [(error.of, error.flag) for error in errors]
    has_experts = critic == "qwen3-30b-a3b"
    expected = ("the critic", "--moe-router-load-balancing-type seq_aux_loss")
    assert found == [expected] * has_experts
