"""A file for --rl-import: seconds of vLLM's forward passes and sampling, for `rollout_trl.py`.

MCORE_RL_FORWARD_SECONDS names a folder, which gets `RANK.txt` with a line for every hand-over: the
seconds of this process so far.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = "MCORE_RL_FORWARD_SECONDS"
_total = 0.0


def _timed(owner: type, name: str) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)  # our patches check the parameters
    def timing(*args: Any, **keywords: Any) -> Any:
        global _total
        started = time.perf_counter()
        try:
            return real(*args, **keywords)
        finally:
            _total += time.perf_counter() - started

    setattr(owner, name, timing)


def per_step(folder: Path, left_out: int) -> float:
    """Return the mean seconds between two hand-overs, in the process that has most."""
    texts = [file.read_text() for file in folder.glob("*.txt")]
    totals = [[float(line) for line in text.split()][left_out:] for text in texts]
    return max((each[-1] - each[0]) / (len(each) - 1) for each in totals)


# The processes of environments import this file, too, and are forked from one that should be small.
if getattr(sys.modules["__main__"].__spec__, "name", "") == "mcore_rl.train":
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine

    for method in ("execute_model", "sample_tokens"):
        _timed(GPUModelRunner, method)
    _reload = VLLMEngine.reload

    def _noting(self: VLLMEngine, *args: Any, **keywords: Any) -> None:
        file = Path(os.environ[FOLDER]) / f"{os.environ.get('RANK', '0')}.txt"
        with file.open("a") as out:
            print(_total, file=out)
        _reload(self, *args, **keywords)

    VLLMEngine.reload = _noting  # type: ignore[method-assign]
