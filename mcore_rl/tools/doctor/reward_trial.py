"""Trial of a reward in a separate process: import it, score samples, report the outcomes.

    python -m mcore_rl.tools.doctor.reward_trial FILE_DESCRIPTOR < pickled request

The request is a pickled (RewardSpec, samples, more samples), each sample (Prompt, response), from
the process that started this one. A function that fails on the first samples is not tried on the
others, whose output is discarded. The answer, JSON, goes to the file descriptor; standard output
and error belong to the reward. The module imports neither torch nor Megatron nor vLLM.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.common.errors import UsageError
from mcore_rl.rewards.specs import RewardSpec, check_rewards
from mcore_rl.rewards.stack import RewardStack

Sample = tuple[Prompt, str]


def main() -> None:
    """Score the samples of the request on standard input."""
    logging.disable(logging.CRITICAL)  # failures are in the answer
    spec, samples, more = pickle.load(sys.stdin.buffer)
    answer = json.dumps(_trial(spec, samples, more)).encode()
    with os.fdopen(int(sys.argv[1]), "wb") as out:
        out.write(answer)


def _trial(spec: RewardSpec, samples: Sequence[Sample], more: Sequence[Sample]) -> dict[str, Any]:
    """Return {"refused": fields of a UsageError}, or {"outcomes": {name: [[reward, kind, failure],
    ...]}}, with null for kind and failure if there is a reward."""
    servers = [server.name for server in spec.servers]
    try:
        check_rewards(spec)
        if not samples:
            return {"outcomes": {}}
        found = _outcomes(spec, servers, [*samples, *more])  # in one request if they fit
        found |= _outcomes(spec, spec.functions, samples)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        working = [n for n in spec.functions if all(kind is None for _, kind, _ in found[n])]
        for name, outcomes in _outcomes(spec, working, more).items():
            found[name] += outcomes
    except UsageError as error:
        return {"refused": {"found": error.found, "flag": error.flag, "remedy": error.remedy}}
    except RuntimeError as error:  # workers that die at once
        return {"refused": {"found": str(error), "flag": "", "remedy": "correct what it imports"}}
    return {"outcomes": found}


def _outcomes(
    spec: RewardSpec, names: Sequence[str], samples: Sequence[Sample]
) -> dict[str, list[list[Any]]]:
    """Return the outcomes of the rewards `names` for samples."""
    if not names or not samples:
        return {}
    servers = tuple(server for server in spec.servers if server.name in names)
    weights = (1.0,) * len(names)
    some = dataclasses.replace(spec, names=tuple(names), weights=weights, servers=servers)
    with RewardStack(some) as stack:
        found = stack.outcomes([_rollout(sample) for sample in samples])
    return {
        name: [[each.reward, each.kind, each.failure] for each in outcomes]
        for name, outcomes in found.items()
    }


def _rollout(sample: Sample) -> Rollout:
    prompt, response = sample
    nothing = np.zeros(0, dtype=np.int32)
    return Rollout(
        prompt=prompt,
        sample_index=0,
        text=response,
        response_token_ids=nothing,
        rollout_log_probs=np.zeros(0, dtype=np.float32),
        finish_reason="stop",
        weight_version=0,
    )


if __name__ == "__main__":
    main()
