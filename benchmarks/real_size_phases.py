"""A file for --rl-import: records begin and end of each phase of a run.

Each rank appends a JSON object a line to MCORE_RL_PHASES: `phase` by its name in a plan, `rank`,
`begin` and `end` in seconds of the clock.
"""

import functools
import json
import os
import time
from pathlib import Path


def recorded(target, name, phase_of):
    """Record calls of a function or method as the phase that `phase_of` names."""
    function = getattr(target, name)

    @functools.wraps(function)
    def call(*args, **kwargs):
        begin = time.time()
        try:
            return function(*args, **kwargs)
        finally:
            line = {"phase": phase_of(), "rank": int(os.environ["RANK"])}
            with Path(os.environ["MCORE_RL_PHASES"]).open("a") as file:
                file.write(json.dumps(line | {"begin": begin, "end": time.time()}) + "\n")

    setattr(target, name, call)


def note_phases():
    import sys

    from mcore_rl import train
    from mcore_rl.hybrid_engine.proof.canary import Canary
    from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
    from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
    from mcore_rl.megatron import adapter
    from mcore_rl.trainer import exports
    from mcore_rl.trainer.saver import RunSaver

    switches = iter(["first switch"])
    build = "resume" if "--load" in sys.argv else "build"
    for target, name, phase in (
        (adapter, "setup", build),
        (VLLMEngine, "__init__", "start"),
        (Canary, "score", "canary"),
        (train.Run, "collect", "rollout"),
        (train.Run, "with_log_probs", "log-probs"),
        (train.Run, "update", "train"),
        (RunSaver, "save_if_due", "save"),
        (RunSaver, "save", "last save"),  # waits for what is written in the background
        (exports, "export", "export"),
    ):
        recorded(target, name, lambda phase=phase: phase)
    recorded(MegatronVLLMShardingManager, "__enter__", lambda: next(switches, "hand-over"))


if "RANK" in os.environ:  # not in rewards' workers
    note_phases()
