"""Packed or padded updates, in a separate process for `step_time.py`; prints JSON.

    python benchmarks/step_time_packing.py CHECKPOINT packed|padded

Samples of log-normal lengths pass the stages after rewards (tensors, log-probs, advantages,
update), without an engine, in one process. Both kinds get the same samples. A padded micro-batch of
4 has 632 positions on average and 1,228 at most, a packed one 640 at most.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

NUM_SAMPLES, GROUP_SIZE = 64, 8
MEDIAN_TOKENS, SIGMA, LIMIT_TOKENS = 64, 0.8, 512
PROMPT_TOKENS = 8
KINDS = {
    "packed": ("--rl-max-tokens-per-microbatch", "640"),
    "padded": ("--micro-batch-size", "4"),
}
WARM_UPS, REPETITIONS = 1, 5


def sample_lengths(seed: int = 0) -> np.ndarray:
    """Return `[n]`: tokens of each sample, prompt included."""
    rng = np.random.default_rng(seed)
    drawn = MEDIAN_TOKENS * np.exp(SIGMA * rng.standard_normal(NUM_SAMPLES))
    return np.clip(drawn.astype(np.int64), PROMPT_TOKENS + 2, LIMIT_TOKENS)


def samples(lengths: np.ndarray, vocab_size: int) -> list[Any]:
    """Return samples of random tokens, with rewards that differ within every group."""
    from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout

    rng = np.random.default_rng(1)
    found = []
    for index, length in enumerate(lengths):
        tokens = rng.integers(6, vocab_size, size=length).astype(np.int32)
        rollout = Rollout(
            prompt=Prompt(index // GROUP_SIZE, "", "", tokens[:PROMPT_TOKENS]),
            sample_index=index % GROUP_SIZE,
            text="",
            response_token_ids=tokens[PROMPT_TOKENS:],
            rollout_log_probs=np.full(length - PROMPT_TOKENS, -6.0, dtype=np.float32),
            finish_reason="stop",
            weight_version=1,
        )
        found.append(ScoredRollout(rollout, reward=float(index % 2)))
    return found


def measured(checkpoint: Path, kind: str) -> dict[str, Any]:
    """Return seconds of all repetitions, their tokens, and the peak memory above the model's."""
    from benchmarks.measuring import return_freed_memory_at_once
    from mcore_rl.hybrid_engine.memory.usage import PeakMemory
    from mcore_rl.job.start import start
    from mcore_rl.trainer.models import build_actor, build_learner

    prompts = checkpoint / "prompts" / "train.jsonl"
    tokens = (
        f"--rl-hf-checkpoint {checkpoint} --rl-prompts {prompts} --rl-reward arithmetic "
        f"--rl-max-prompt-tokens {PROMPT_TOKENS} "
        f"--rl-max-response-tokens {LIMIT_TOKENS - PROMPT_TOKENS} "
        f"--rl-num-prompts-per-step {NUM_SAMPLES // GROUP_SIZE} "
        f"--rl-num-samples-per-prompt {GROUP_SIZE} --lr 1e-6"
    ).split()
    with open(os.devnull, "w") as nowhere:
        job = start([*tokens, *KINDS[kind]], log=nowhere)
        state, shards = build_actor(job, log=nowhere)
    learner = build_learner(job, state, shards, None)
    scored = samples(sample_lengths(), job.spec.shape.vocab_size)
    # Before large allocations: otherwise memory that malloc keeps would not be counted.
    return_freed_memory_at_once(True)
    seconds, cpu_seconds = [], []
    for number in range(WARM_UPS + 1):
        with PeakMemory() as peak:  # the last counts; the first allocates optimizer state
            _step(learner, scored, number)
    return_freed_memory_at_once(False)
    for number in range(REPETITIONS):
        started, cpu_started = time.perf_counter(), time.process_time()
        _step(learner, scored, number)
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens": int(sample_lengths().sum()),
        "peak_bytes": peak.extra_bytes,
    }


def _step(learner: Any, scored: list[Any], number: int) -> None:
    learner.sample_store.clear()
    draws = [sample.rollout.prompt.index for sample in scored]
    table = learner.sample_store.table(learner.sample_store.add(scored), draws)
    batch = learner.with_log_probs(learner.make_batch(number, table))
    learner.update(number, learner.with_advantages(table, batch))


if __name__ == "__main__":
    found = measured(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps(found), flush=True)
    os._exit(0)
