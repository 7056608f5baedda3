"""The stages of the trial: purpose, requirements and time limit of each. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
ENVIRONMENT = "environment"
MOST_SECONDS = 480
_BOTH = ("torch", "megatron.training", "vllm")


@dataclass(frozen=True)
class Stage:
    """One stage; `packages` are the required modules, `num_devices` the GPUs or, without a GPU,
    processes."""

    name: str
    shows: str
    limit_seconds: int = MOST_SECONDS
    num_devices: int = 1
    packages: tuple[str, ...] = _BOTH
    only_cuda: bool = False


STAGES = (
    Stage(
        ENVIRONMENT,
        "what is installed, or else installs it; versions and devices",
        packages=(),
    ),
    Stage("doctor", "mcore-rl doctor on the tiny job", 240, packages=("torch",)),
    Stage(
        "gpu-tests",
        "tests/gpu, what needs no engine: offload, Megatron's side alone, NCCL, Megatron-FSDP",
        packages=("torch", "megatron.training", "pytest"),
    ),
    Stage(
        "gpu-engine",
        "tests/gpu, the engine: sleep and wake, reload in place under graphs, training beside it",
        packages=(*_BOTH, "pytest"),
    ),
    Stage("verify-eager", "hand-over bit for bit and log-probs, tiny MoE and dense, TP1, eager"),
    Stage("verify-graphs", "the same with CUDA graphs"),
    Stage("train", "three GRPO steps, everything offloaded, proved in full, exported"),
    Stage("resume", "a run is killed and goes on; metrics and weights bit for bit"),
    Stage("switch", "seconds and bytes a second of a switch beside a copy on the device"),
    Stage("step-time", "seconds of a step, beside TRL with vLLM colocated where it is installed"),
    Stage("trace", "a traced run, by CUDA_DEVICE_MAX_CONNECTIONS of 1 and 8: prefetch, rollout"),
    Stage("two-pp", "PP2: point to point; hand-over, two steps", num_devices=2),
    Stage("two-tp", "TP2: hand-over, two steps", num_devices=2),
    Stage("four-tp", "TP' other than TP: TP2 PP2 into engines of TP1 and of TP4", num_devices=4),
    Stage(
        "four-ep-dp",
        "experts over the engine's own data-parallel ranks: TP2 EP4 into TP2 DP2 EP4",
        num_devices=4,
        only_cuda=True,
    ),
)
NAMES = tuple(stage.name for stage in STAGES)


def missing(stage: Stage, facts: Mapping[str, Any]) -> str | None:
    """Return why the stage cannot run with `facts` (of `environments.probe`); None if it can."""
    if facts.get("python") is None:
        return f"no Python with torch and Megatron was found: {facts.get('error', 'none is here')}"
    for package in stage.packages:
        found = facts["packages"].get(package, {})
        if not found.get("imports"):
            why = found.get("error") or "it is not installed"
            return f"needs {package}, which cannot be imported: {why}"
    if stage.only_cuda and not facts["has_cuda"]:
        return "needs CUDA: vLLM on CPU does not run experts over its own data-parallel ranks"
    if facts["devices"] < stage.num_devices:
        kind = "GPUs" if facts["has_cuda"] else "processes (one a core, without a GPU)"
        return f"needs {stage.num_devices} {kind}; here: {facts['devices']}"
    return None
