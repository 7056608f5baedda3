"""The reward `pooling`, asked of vLLM's own server with a tiny reward model."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
from mcore_rl.rewards.stack import RewardStack
from tests.rank_pool import free_port
from tests.reward_specs import rewards_of
from tests.vllm_servers import SERVE

pytestmark = pytest.mark.timeout(400)

START_SECONDS = 300
MAX_TOKENS = 32
FLAGS = [
    *("--host", "127.0.0.1", "--runner", "pooling", "--dtype", "bfloat16", "--enforce-eager"),
    *("--max-model-len", str(MAX_TOKENS), "--max-num-seqs", "8"),
]
# One score for the sequence, and one for each of its tokens; the last token's is the sequence's.
TASKS = {"classify": [], "token_classify": ["--pooler-config", '{"task": "token_classify"}']}

TEXTS = [("1+2=", "3"), ("1+2=", "4"), ("hello", ""), ("", "x"), ("the prompt", " and response")]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with one label, and a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("reward_model")
    words = ["<unk>", "<eos>", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,  # one that vLLM's attention on CPU knows
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=1,
        initializer_range=0.3,  # texts must differ by more than bfloat16 rounds off
    )
    LlamaForSequenceClassification(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=list(TASKS))
def url(
    request: pytest.FixtureRequest,
    reward_model: Path,
    warm_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [
                *(str(warm_python), "-c", SERVE, "--model", str(reward_model), "--port", str(port)),
                *FLAGS,
                *TASKS[request.param],
            ],
            env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the engine is a process of its own, to be ended with it
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not is_healthy(address):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield address
    finally:
        end(server)


def is_healthy(address: str) -> bool:
    try:
        return requests.get(f"{address}/health", timeout=5).ok
    except requests.RequestException:
        return False


def end(server: subprocess.Popen[bytes]) -> None:
    """Ends the server and what it started, gently first."""
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    server.wait()


def rollouts(*texts: tuple[str, str]) -> list[Rollout]:
    none = np.zeros(0, np.float32)
    return [
        Rollout(Prompt(i, prompt, "", none.astype(np.int32)), 0, response, none, none, "stop", 0)
        for i, (prompt, response) in enumerate(texts)
    ]


def score(url: str, *texts: tuple[str, str]) -> list[ScoredRollout]:
    spec = rewards_of("pooling", reward_timeout_seconds=60, reward_pooling_url=url)
    with RewardStack(spec) as stack:
        return stack.score(rollouts(*texts))


def test_rewards_are_the_logits_that_transformers_computes(url: str, reward_model: Path) -> None:
    """In float32; 2% of the logits' spread for a server that computes in bfloat16."""
    model = LlamaForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reward_model)
    with torch.no_grad():
        expected = [
            model(torch.tensor([tokenizer(prompt + response)["input_ids"]])).logits.item()
            for prompt, response in TEXTS
        ]
    scored = score(url, *TEXTS)
    assert [s.failure for s in scored] == [None] * len(TEXTS)
    spread = max(expected) - min(expected)
    assert spread > 2  # beyond what a sigmoid could give
    np.testing.assert_allclose([s.reward for s in scored], expected, atol=0.02 * spread)


def test_a_text_that_is_too_long_costs_its_sample_only(url: str) -> None:
    scored = score(url, TEXTS[0], ("x" * MAX_TOKENS, "y"), TEXTS[0])
    assert [s.failure for s in scored] == [None, "HTTP status 400", None]
    assert scored[0].reward == scored[2].reward != 0
