"""Measure how many samples a second the rewards of a run score.

    python -m benchmarks.reward_throughput [--samples 128] [--repeats 5]

It scores samples by a function that returns at once, by one that takes 50 ms and by
`python_sandbox`, each with one worker and with two. The first samples of each pool, which wait for
the start of its workers, are not counted. The fastest repeat counts, as other programs only slow
the rest down.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.rewards.options import RewardOptions
from mcore_rl.rewards.specs import parse_rewards
from mcore_rl.rewards.stack import RewardStack

_FUNCTIONS = """
import time

from mcore_rl.api import reward


@reward("takes_0_ms")
def takes_0_ms(*, prompt, response, answer):
    return 1.0


@reward("takes_50_ms")
def takes_50_ms(*, prompt, response, answer):
    time.sleep(0.05)
    return 1.0
"""
_CODE = "```python\ndef add(a, b):\n    return a + b\n```"
_TESTS = "assert add(1, 2) == 3"


def samples(number: int) -> list[Rollout]:
    """Return samples whose responses pass the tests in their answers."""
    ids = np.zeros(1, np.int32)
    prompt = Prompt(0, "Write a function add.", _TESTS, ids)
    return [
        Rollout(prompt, index, _CODE, ids, np.zeros(1, np.float32), "stop", 0)
        for index in range(number)
    ]


def samples_per_second(
    reward: str, file: Path, *, num_workers: int, num_samples: int, num_repeats: int
) -> float:
    """Return the best rate of several repeats, after one that warms up."""
    spec = parse_rewards(reward, RewardOptions(reward_workers=num_workers), imports=[str(file)])
    best_seconds = float("inf")
    with RewardStack(spec) as stack:
        for repeat in range(num_repeats + 1):
            started = time.perf_counter()
            scored = stack.score(samples(num_samples))
            seconds = time.perf_counter() - started
            assert all(each.reward == 1.0 for each in scored), scored[0].failure
            if repeat:
                best_seconds = min(best_seconds, seconds)
    return num_samples / best_seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "functions.py"
        file.write_text(_FUNCTIONS)
        for reward in ("takes_0_ms", "takes_50_ms", "python_sandbox"):
            for num_workers in (1, 2):
                rate = samples_per_second(
                    reward,
                    file,
                    num_workers=num_workers,
                    num_samples=options.samples,
                    num_repeats=options.repeats,
                )
                print(f"{reward}, {num_workers} worker(s): {rate:.0f} samples/s", flush=True)


if __name__ == "__main__":
    main()
