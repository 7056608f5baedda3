"""A task of two turns for the tiny checkpoint and the environment `calculator`.

The prompt is `47 ?`. The answer is in the calculator's memory and cannot be known in advance: a
turn that consists of any single number recalls it, a message of role user shows it, and the next
turn is right if its last number is the one shown.

The tiny checkpoint was trained to write two numbers, `15 85`, so at first few of its turns are
calls, and hardly any of its answers is right.

    python scripts/calculator_task.py FOLDER [SEED]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_DIGITS = 4  # number of answers: a guess is seldom right, but often enough
FIRST_DIGIT = 2
NUM_HELDOUT = 20  # of the prompts, each of which occurs with every answer


def write_prompts(folder: Path, seed: int) -> None:
    """Write `train.jsonl` and `heldout.jsonl` with the columns `prompt`, `answer` and `memory`."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    numbers = rng.sample(range(10, 100), 90)
    digits = range(FIRST_DIGIT, FIRST_DIGIT + NUM_DIGITS)
    for name, prompts in {"train": numbers[NUM_HELDOUT:], "heldout": numbers[:NUM_HELDOUT]}.items():
        rows = [
            {"prompt": f"{number} ?", "answer": str(digit), "memory": digit}
            for number in prompts
            for digit in digits
        ]
        rng.shuffle(rows)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_prompts(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
