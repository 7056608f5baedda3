"""A real instruct model of 135 million parameters: log-probs, and a short run of its example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_rl.observe.run_directory import read_config
from tests.dist.checkpoints import log_probs_of
from tests.dist.layouts import job_flags
from tests.e2e.recipe import metrics_of, run_example
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 48
# |log-prob difference| to transformers in float32: mean and maximum over real texts.
BOUNDS = {"fp32": (2e-5, 2e-4), "bf16": (0.05, 0.6)}


@pytest.fixture(scope="module")
def texts(smollm2: Path) -> torch.Tensor:
    """`[8, NUM_TOKENS]`: held-out prompts in the chat template with their answers in a sentence."""
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    lines = (smollm2 / "prompts" / "heldout.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:: len(lines) // 8][:8]]
    chats = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": f"The answer is {row['answer']}. " * 8},
        ]
        for row in rows
    ]
    encoded = tokenizer.apply_chat_template(chats)["input_ids"]
    return torch.tensor([ids[-NUM_TOKENS - 8 :][:NUM_TOKENS] for ids in encoded])


@pytest.fixture(scope="module")
def expected(smollm2: Path, texts: torch.Tensor) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return log_probs_of(model, texts)


@pytest.mark.parametrize("precision", BOUNDS)
def test_log_probs_are_those_of_transformers(
    smollm2: Path, texts: torch.Tensor, expected: torch.Tensor, ranks: RankPool, precision: str
) -> None:
    (found,) = ranks.run(
        "tests.dist.jobs:log_probs_of",
        world_size=1,
        flags=job_flags(smollm2, "tp1_pp1_ep1", precision=precision),
        tokens=texts.tolist(),
    )
    differences = (torch.tensor(found)[:, :-1] - expected).abs()
    print(f"{precision}: mean {differences.mean():.2e}, at most {differences.max():.2e}")
    mean, most = BOUNDS[precision]
    assert differences.mean() < mean and differences.max() < most


def test_the_example_runs_by_its_script(smollm2: Path, warm_python: Path, tmp_path: Path) -> None:
    """Two steps of four prompts; the plan packs, and an export is loaded by transformers."""
    run_example(
        "smollm2",
        *("--rl-num-steps", "2", "--rl-num-prompts-per-step", "4", "--rl-eval-interval", "0"),
        *("--rl-run-dir", tmp_path / "run", "--rl-export-hf", tmp_path / "exported"),
        *("--rl-rollout-kv-cache-gib", "0.25"),
        python=warm_python,
        folder=tmp_path,
        MCORE_RL_SKIP_SETUP="1",
        MCORE_RL_CACHE=str(smollm2.parent),
    )
    steps = metrics_of(tmp_path / "run")
    assert [metrics["step"] for metrics in steps] == [0, 1]
    # bfloat16 on both sides, whose kernels round differently.
    assert all(0 < metrics["kl/rollout_actor"] < 0.1 for metrics in steps)
    given = read_config(tmp_path / "run" / "config.yaml").given
    assert given["rl-max-tokens-per-microbatch"] >= 1024 and "micro-batch-size" not in given
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
        for folder in (smollm2, tmp_path / "exported")
    )
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > len(before) / 2
    assert (tmp_path / "exported" / "chat_template.jinja").read_text() == (
        smollm2 / "chat_template.jinja"
    ).read_text()
