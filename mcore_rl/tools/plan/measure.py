"""`mcore-rl plan --measure-engine`: seconds of an engine's steps by the number of sequences.

It starts the engines of a job as a run does, with the checkpoint's weights, but no models of
Megatron. All engines of the world are measured at the same time, as in a run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from mcore_rl.common.errors import UsageError, check_output_file
from mcore_rl.hybrid_engine.vllm.generation import Request, Sampling
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.job.start import start
from mcore_rl.model.lora import ADAPTERS
from mcore_rl.planner.simulated_workload import prefill_rate
from mcore_rl.spec import JobSpec
from mcore_rl.trainer.hand_overs import engine_config

STEPS = 16  # measured for each number of sequences
_LEAST_BATCHED_TOKENS = 2048  # that vLLM computes in one step of a prefill


def measure(file: Path, tokens: Sequence[str]) -> int:
    """Measure the engines of the job `tokens`, and write the speed of the first. Collective over
    the processes of the launcher. Raises UsageError."""
    check_output_file(file, f"--measure-engine {file}")
    job = start(tokens, program="mcore-rl plan", also_check=_check)
    config, shape = job.config, job.spec.shape
    engine = VLLMEngine(engine_config(job, load_format="auto"))
    try:
        speed = speed_of(
            engine,
            prompt_tokens=max(1, config.data.max_prompt_tokens // 2),
            most_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
            vocab_size=shape.vocab_size,
        )
    finally:
        engine.close()
    if dist.get_rank() == 0:
        about = {"engine": job.spec.rollout_layout.describe(), "model": shape.architecture}
        file.write_text(json.dumps({**speed, **about}, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {file}: {', '.join(map(str, speed['running']))} sequences")
    return 0


def speed_of(
    engine: VLLMEngine, *, prompt_tokens: int, most_tokens: int, vocab_size: int
) -> dict[str, Any]:
    """Return the fields of the file: the median of `STEPS` steps for 1, 2, 4, ... sequences, as
    many as the engine runs and its KV cache holds, and the rates of prefills: of new prompts, and
    of repeated ones. A sequence has at most `most_tokens`. Collective over the engine's ranks."""
    most = engine.config.max_num_seqs
    counts = sorted({1 << power for power in range(most.bit_length())} | {most})
    random = np.random.default_rng(1)

    def prompts(count: int, length: int = prompt_tokens) -> list[np.ndarray]:
        return list(random.integers(0, vocab_size, (count, length), dtype=np.int32))

    _seconds_of_steps(engine, prompts(1), STEPS)  # compiles
    measured = {}
    for count in counts:
        num_prefills = count * prompt_tokens // _LEAST_BATCHED_TOKENS + 1
        num_tokens = STEPS + num_prefills
        length = prompt_tokens + num_tokens
        if length > most_tokens or count * length > engine.kv_cache_tokens:
            break
        seconds = _seconds_of_steps(engine, prompts(count), num_tokens)
        measured[count] = statistics.median(seconds[num_prefills:][:STEPS])
    if not measured:
        raise UsageError(
            f"leave no room for {STEPS} tokens after a prompt of {prompt_tokens}",
            flag="--rl-max-prompt-tokens and --rl-max-response-tokens",
            remedy="raise the latter",
        )
    several = prompts(max(1, 4 * _LEAST_BATCHED_TOKENS // prompt_tokens))

    def rate(prompts: Sequence[np.ndarray]) -> float:
        return prefill_rate(_steps(engine, prompts, 1), sum(map(len, prompts)), measured)

    new_rate = rate(several)
    # The engine's cache of prefixes, if it has one, holds whole blocks only: longer prompts.
    long = prompts(max(1, 4 * _LEAST_BATCHED_TOKENS // most_tokens), most_tokens - 1)
    _seconds_of_steps(engine, long, 1)
    return {
        "running": list(measured),
        "step_seconds": list(measured.values()),
        "prefill_tokens_per_second": new_rate,
        "repeated_tokens_per_second": rate(long),
        "prompt_tokens": prompt_tokens,
    }


def _seconds_of_steps(
    engine: VLLMEngine, prompts: Sequence[np.ndarray], num_tokens: int
) -> list[float]:
    """Return the seconds of each step until all prompts have `num_tokens` tokens more."""
    return [seconds for seconds, _ in _steps(engine, prompts, num_tokens)]


def _steps(
    engine: VLLMEngine, prompts: Sequence[np.ndarray], num_tokens: int
) -> list[tuple[float, int]]:
    """Return also how many prompts ended in each step."""
    steps = []
    with engine.generation() as generation:
        for number, token_ids in enumerate(prompts):
            sampling = Sampling(ignore_eos=True)
            generation.submit(
                Request(number, token_ids, max_tokens=num_tokens, sampling=sampling, seed=number)
            )
        while engine.any_rank(generation.num_running > 0):
            began = time.perf_counter()
            ended = generation.step()
            steps.append((time.perf_counter() - began, len(ended)))
    return steps


def _check(spec: JobSpec) -> None:
    """Check that all ranks run engines, and that vLLM can load the checkpoint by itself."""
    if spec.roles.rollout or spec.roles.actor != tuple(range(spec.roles.world_size)):
        raise UsageError(
            "starts engines on all ranks, so that none may have a role of its own",
            flag="--measure-engine",
            remedy="drop --rl-rollout-ranks, --rl-rollout-servers, --rl-critic-ranks and "
            "--rl-reward-ranks",
        )
    if spec.lora is not None and spec.config.lora.rollout == ADAPTERS:
        raise UsageError(
            "has no adapters to give to engines",
            flag="--measure-engine",
            remedy=f"drop --rl-lora-rollout {ADAPTERS}",
        )
    if spec.shape.quantization is not None or not spec.checkpoint.is_all_that_vllm_reads:
        raise UsageError(
            "reads the weights by vLLM's own loader, which does not know this checkpoint as a run "
            "uses it",
            flag="--measure-engine",
            remedy="give --rl-hf-checkpoint the same model in bfloat16",
        )
