"""The critic's model against transformers, and a critic that is saved and loaded again."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from tests.dist.checkpoints import tensors_of
from tests.dist.jobs import random_batch
from tests.dist.layouts import SPLITS, job_flags
from tests.dist.value_model_jobs import NUM_SAVED_STEPS
from tests.rank_pool import RankPool

# float32 on both sides, added up in another order; values are of the size of 1.
TOLERANCE = 1e-4
PPO_FLAGS = tuple(
    "--rl-algorithm ppo --rl-num-samples-per-prompt 2 --rl-max-tokens-per-microbatch 128".split()
)


def reward_model(base: Path, folder: Path, *, with_lm_head: bool) -> Path:
    """A copy of a checkpoint with a random `score.weight`, as a reward model's folder has one."""
    shutil.copytree(base, folder)
    tensors = tensors_of(base)
    hidden = json.loads((base / "config.json").read_text())["hidden_size"]
    generator = torch.Generator().manual_seed(8)
    tensors["score.weight"] = torch.randn(1, hidden, generator=generator) / math.sqrt(hidden)
    if not with_lm_head:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def flags_of(base: Path, init: Path, split: str, *more: str) -> list[str]:
    given = (*PPO_FLAGS, "--rl-critic-init", str(init), *more)
    return job_flags(base, split, *given, micro_batch_size=1)


@torch.no_grad()
def reference_values(folder: Path, token_ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each token's value: one sample after the other through transformers, in float32."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    head = tensors_of(folder)["score.weight"].float()
    return [(model(tokens[None]).last_hidden_state[0] @ head.T)[:, 0] for tokens in token_ids]


@pytest.mark.parametrize("split", ["tp1_pp1_ep1", "tp2_pp2_ep2"])
@pytest.mark.parametrize("arch", ["deepseek_v3", "qwen3_moe"])
def test_values_equal_transformers_in_float32(
    arch: str,
    split: str,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    base = checkpoint_factory(arch)
    init = reward_model(base, tmp_path / "reward", with_lm_head=arch == "qwen3_moe")
    results = ranks.run(
        "tests.dist.value_model_jobs:values_of_init",
        world_size=SPLITS[split][3],
        flags=flags_of(base, init, split),
    )
    batch = random_batch(json.loads((base / "config.json").read_text())["vocab_size"])
    expected = reference_values(init, batch.token_ids.split(batch.lengths.tolist()))
    assert torch.cat(expected).std() > 0.1, "values that hardly differ show nothing"
    for found in results:  # every rank has all of them
        for of_sample, expected_of_sample in zip(found, expected, strict=True):
            assert (torch.tensor(of_sample) - expected_of_sample).abs().max() <= TOLERANCE


# (split, precision)
RESUMED = [("tp2_pp2_ep2", "bf16"), ("tp1_pp1_ep1", "fp32")]


@pytest.fixture(scope="module")
def resumed(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> Callable[[str, str], tuple[dict, list[dict]]]:
    """The results of an uninterrupted run, and of each rank of one resumed by `--load`."""

    @functools.cache
    def resumed(split: str, precision: str) -> tuple[dict, list[dict]]:
        base = checkpoint_factory("deepseek_v3")
        folder = tmp_path_factory.mktemp("resumed")
        init = reward_model(base, folder / "reward", with_lm_head=False)
        options = ("--rl-critic-lr", "0.001", "--rl-precision", precision)
        checkpoints = str(folder / "checkpoints")
        saved = ranks.run(
            "tests.dist.value_model_jobs:update_and_save",
            world_size=SPLITS[split][3],
            flags=flags_of(base, init, split, *options),
            folder=checkpoints,
        )[0]
        loading = {"flags": flags_of(base, init, split, *options, "--load", checkpoints)}
        loaded = ranks.run(
            "tests.dist.value_model_jobs:load_and_update", world_size=SPLITS[split][3], **loading
        )
        if (split, precision) == RESUMED[1]:
            refusals = ranks.run(
                "tests.dist.value_model_jobs:refuses_another_step", world_size=1, **loading
            )
            loaded[0]["refusal"] = refusals[0]
        return saved, loaded

    return resumed


def test_a_saved_critic_has_its_values_when_it_is_loaded(
    resumed: Callable[[str, str], tuple[dict, list[dict]]],
) -> None:
    saved, loaded = resumed("tp2_pp2_ep2", "bf16")
    assert saved["saved"] != saved["first"], "the update moved nothing"
    for found in loaded:
        assert found["iteration"] == NUM_SAVED_STEPS
        for name in ("saved", "learning_rate"):  # bit for bit
            assert found[name] == saved[name], name
        # The gradient of the first mini-batch is that of the same weights.
        assert found["grad_norms"][0] == saved["grad_norms"][0]


@pytest.mark.parametrize(("split", "precision"), RESUMED)
def test_a_loaded_critic_learns_as_if_it_had_gone_on(
    split: str, precision: str, resumed: Callable[[str, str], tuple[dict, list[dict]]]
) -> None:
    saved, loaded = resumed(split, precision)
    for found in loaded:
        for name in ("saved", "learning_rate", "grad_norms", "updated"):  # bit for bit
            assert found[name] == saved[name], name


def test_a_critic_of_another_step_than_the_actor_is_refused(
    resumed: Callable[[str, str], tuple[dict, list[dict]]],
) -> None:
    refusal = resumed(*RESUMED[1])[1][0]["refusal"]
    assert f"is not of step {NUM_SAVED_STEPS + 1}, as the actor is" in refusal
    assert "--ckpt-step" in refusal
