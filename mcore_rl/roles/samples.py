"""Samples on their way to a role with ranks of its own: their tokens and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout


def samples_to_tensors(scored: Sequence[ScoredRollout]) -> dict[str, torch.Tensor]:
    """`token_ids` `[T]`, all samples one after the other; `prompt` and `response` `[n]`, how many
    of them are which; `valid` `[n]`, 1 for what can be learnt from; all int64."""
    pieces: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    for sample in scored:
        pieces += [
            np.asarray(sample.rollout.prompt.token_ids),
            np.asarray(sample.rollout.response_token_ids),
        ]
    return {
        "token_ids": torch.from_numpy(np.concatenate(pieces).astype(np.int64)),
        "prompt": torch.tensor(
            [len(s.rollout.prompt.token_ids) for s in scored], dtype=torch.int64
        ),
        "response": torch.tensor(
            [len(s.rollout.response_token_ids) for s in scored], dtype=torch.int64
        ),
        "valid": torch.tensor([s.is_valid for s in scored], dtype=torch.int64),
    }


def tensors_to_samples(tensors: Mapping[str, torch.Tensor]) -> list[ScoredRollout]:
    """The samples again, without texts, log-probs and rewards."""
    token_ids = tensors["token_ids"].numpy()
    scored, end = [], 0
    for prompt, response, valid in zip(
        *(tensors[name].tolist() for name in ("prompt", "response", "valid")), strict=True
    ):
        start, middle, end = end, end + prompt, end + prompt + response
        rollout = Rollout(
            prompt=Prompt(len(scored), "", "", token_ids[start:middle]),
            sample_index=0,
            text="",
            response_token_ids=token_ids[middle:end],
            rollout_log_probs=np.zeros(response, dtype=np.float32),
            finish_reason="",
            weight_version=0,
        )
        failure = None if valid else "as told by the actor"
        scored.append(ScoredRollout(rollout, reward=0.0, failure=failure))
    return scored
