"""What saves memory changes no bit: recomputation, offload, log-probs in chunks.

One process, a DeepSeek-V3 of two layers as actor and critic; each switch is turned on alone and all
learn the same steps from the same checkpoint. test_invariance.py compares them across layouts,
where sums run in other orders and a tolerance is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.hybrid_engine.memory.offload import KINDS
from tests.dist.layouts import job_flags
from tests.rank_pool import RankPool

pytestmark = pytest.mark.timeout(400)

Learned = dict[str, Any]  # variant -> what came of it; and the precision

PPO = (
    *("--rl-algorithm", "ppo", "--rl-kl-coef", "0.05", "--rl-entropy-coef", "0.01"),
    *("--rl-max-tokens-per-microbatch", "128", "--rl-offload", "none", "--lr", "1e-2"),
    # What is kept is computed for the tokens of whole samples.
    *("--rl-share-prompts", "off"),
)
RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "core attention": {"recompute_granularity": "selective"},
    "feed-forward": {"recompute_granularity": "selective", "recompute_modules": ["moe", "mlp"]},
}
OFFLOAD: dict[str, dict[str, Any]] = {
    **{kind: {"offload": kind} for kind in KINDS},
    "all": {"offload": "params,grads,optimizer"},
    "all, gradients kept": {"offload": "params,grads,optimizer", "offload_keep_gradients": True},
}
# Chunks that leave no single rows over: for up to three of them a float32 product on a CPU runs
# another kernel, which rounds otherwise.
CHUNKS = (7, 16)
UNCLIPPED = {"clip_grad": 0.0}  # else the norm would carry a difference into every parameter
OUTPUT_WEIGHT = "output_layer.weight"
# Of its gradient, over its largest element, of sums whose terms cancel: float32 keeps 24 bits,
# bf16, which the product of a chunk has there, 8.
LARGEST_DIFFERENCE = {"fp32": 2**-20, "bf16": 2**-7}
# What is computed of what a model keeps. Without a GPU no kernel is fused: norms, SwiGLU and
# attention keep steps in between, in float32 whatever the precision.
LEAST_SHARE = {"fp32": 0.7, "bf16": 0.6}


def _tokens(args: dict[str, Any]) -> list[str]:
    """As flags."""
    tokens = []
    for dest, value in args.items():
        values = value if isinstance(value, list) else [value]
        tokens += [f"--{dest.replace('_', '-')}", *map(str, values)]
    return tokens


VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {"is_reference": True},
    **{f"recompute {n}": {"args": a, "tokens": _tokens(a)} for n, a in RECOMPUTE.items()},
    **{f"offload {name}": {"config": config} for name, config in OFFLOAD.items()},
    "unclipped": {"is_reference": True, "args": UNCLIPPED},
    **{f"chunk {n}": {"args": UNCLIPPED, "config": {"log_prob_chunk_tokens": n}} for n in CHUNKS},
}


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def learned(
    request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> Learned:
    """What came of each variant."""
    checkpoint, precision = checkpoint_factory("deepseek_v3"), request.param
    flags = job_flags(checkpoint, "tp1_pp1_ep1", *PPO, precision=precision, micro_batch_size=1)
    (found,) = ranks.run(
        "tests.dist.memory_jobs:learn_with_each", world_size=1, flags=flags, variants=VARIANTS
    )
    return {**found, "precision": request.param}


def _assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    first = found["first"]
    assert first["gradients_apart"] == {} and first["num_gradients"] > 10
    assert first == expected["first"]
    assert found["steps"] == expected["steps"]
    assert found["actor"] == expected["actor"]
    assert found["critic"] == expected["critic"]


def test_steps_learn(learned: Learned) -> None:
    """Else all would be the same whatever the switches did."""
    steps = learned["nothing"]["steps"]
    assert steps[0] != steps[1] and steps[0].keys() == steps[1].keys()
    assert {"0 policy_loss", "0 grad_norm", "kl/rollout_actor"} <= steps[0].keys()


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recomputation_changes_no_bit(learned: Learned, name: str) -> None:
    found, expected = learned[f"recompute {name}"], learned["nothing"]
    _assert_same_bits(found, expected)
    # It does what it says, to the actor and to the critic.
    attention_twice = name != "feed-forward"
    assert found["forwards"] == [2.0 if attention_twice else 1.0] * 2
    assert found["kept_bytes"] < expected["kept_bytes"]


@pytest.mark.parametrize("name", OFFLOAD)
def test_offload_changes_no_bit(learned: Learned, name: str) -> None:
    found = learned[f"offload {name}"]
    _assert_same_bits(found, learned["nothing"])
    taken = {kind for kind, size in (found["moved_bytes"] | found["dropped_bytes"]).items()}
    assert taken == (set(KINDS) if name.startswith("all") else {name})


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_of_log_probs_change_no_bit_but_of_the_output_weights_gradient(
    learned: Learned, chunk: int
) -> None:
    """That gradient is a sum over chunks, whose order rounding sees."""
    found, expected = learned[f"chunk {chunk}"]["first"], learned["unclipped"]["first"]
    assert found["log_probs"] == expected["log_probs"]
    assert found["sums"] == expected["sums"]
    assert found["num_gradients"] == expected["num_gradients"] > 10
    ((name, difference),) = found["gradients_apart"].items()
    assert name.endswith(OUTPUT_WEIGHT)
    assert difference < LARGEST_DIFFERENCE[learned["precision"]]


def test_computed_saving_of_recomputation_is_near_what_the_model_keeps(
    learned: Learned,
) -> None:
    full, nothing = learned["recompute full"], learned["nothing"]
    measured = nothing["kept_bytes"] - full["kept_bytes"]
    computed = full["computed"]["whole_bytes"] - full["computed"]["kept_bytes"]
    assert LEAST_SHARE[learned["precision"]] <= computed / measured <= 1.0


def test_lines_say_what_is_switched_on(learned: Learned) -> None:
    assert learned["nothing"]["lines"] == []
    for name in RECOMPUTE:
        (line,) = learned[f"recompute {name}"]["lines"]
        assert line.startswith("actor: activation recomputation (")
    (line,) = learned["chunk 7"]["lines"]
    assert line.startswith("actor: chunked log-probs (--rl-log-prob-chunk-tokens 7), computed")
