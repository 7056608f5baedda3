"""Groups that go on in a later step, as a checkpoint has them: a file of each TP group of engines.

Arrays in a safetensors file, the rest as JSON in its header: nothing is unpickled when it is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.common.readers import parse_json
from mcore_rl.moe.routing import Routes
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.segments import OpenGroup

_NAME = "group_{:05d}.safetensors"
_ARRAYS = ("response_token_ids", "rollout_log_probs", "is_generated", "weight_versions")
_ALL_ARRAYS = (*_ARRAYS, "routes", "routes_known", "prompt_token_ids")
_FACTS = ("text", "finish_reason", "weight_version", "failure")


def write_groups(groups: Sequence[OpenGroup], folder: Path, tp_group: int) -> None:
    """Write those of a TP group; by its first rank, which knows their rewards."""
    arrays: dict[str, np.ndarray] = {"empty": np.empty(0, np.uint8)}  # a file must have one
    facts = []
    for group in groups:
        samples: list[dict[str, Any] | None] = []
        for index, rollout in enumerate(group.rollouts):
            if rollout is None:
                samples.append(None)
                continue
            samples.append({name: getattr(rollout, name) for name in _FACTS})
            for name, array in _arrays_of(rollout).items():
                arrays[f"{group.draw}/{index}/{name}"] = np.ascontiguousarray(array)
        outcomes = {
            str(index): {name: [each.reward, each.kind, each.detail] for name, each in by.items()}
            for index, by in group.outcomes.items()
        }
        facts.append({"draw": group.draw, "samples": samples, "outcomes": outcomes})
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / _NAME.format(tp_group), {"groups": json.dumps(facts)})


def read_groups(
    folder: Path, prompt_of: Callable[[int], Prompt], *, tp_group: int, num_tp_groups: int
) -> list[OpenGroup]:
    """Those that a TP group goes on with: its own, or where there were more or fewer TP groups, its
    share of all, dealt out in the order of their draws.

    `prompt_of` gives the prompt of a draw. Every rank of a TP group reads the same.
    """
    files = sorted(folder.glob("group_*.safetensors"))
    if len(files) == num_tp_groups:
        return _read(files[tp_group], prompt_of)
    every = [group for file in files for group in _read(file, prompt_of)]
    return sorted(every, key=lambda group: group.draw)[tp_group::num_tp_groups]


def _arrays_of(rollout: Rollout) -> dict[str, np.ndarray]:
    found = {name: getattr(rollout, name) for name in _ARRAYS}
    if rollout.routes is not None:
        found |= {"routes": rollout.routes.ids, "routes_known": rollout.routes.known}
    found["prompt_token_ids"] = rollout.prompt.token_ids
    return {name: array for name, array in found.items() if array is not None}


def _read(file: Path, prompt_of: Callable[[int], Prompt]) -> list[OpenGroup]:
    found = []
    with safe_open(file, framework="numpy") as tensors:
        names = set(tensors.keys())
        for facts in parse_json(tensors.metadata()["groups"]):
            prompt = prompt_of(facts["draw"])
            rollouts: list[Rollout | None] = []
            for index, sample in enumerate(facts["samples"]):
                if sample is None:
                    rollouts.append(None)
                    continue
                place = f"{facts['draw']}/{index}/"
                arrays = {
                    name: tensors.get_tensor(place + name)
                    for name in _ALL_ARRAYS
                    if place + name in names
                }
                rollouts.append(_rollout(prompt, index, sample, arrays))
            outcomes = {
                int(index): {name: Outcome(*each) for name, each in by.items()}
                for index, by in facts["outcomes"].items()
            }
            found.append(OpenGroup(facts["draw"], rollouts, outcomes))
    return found


def _rollout(
    prompt: Prompt, index: int, facts: dict[str, Any], arrays: dict[str, np.ndarray]
) -> Rollout:
    prompt = dataclasses.replace(prompt, token_ids=arrays.pop("prompt_token_ids"))
    routes = None
    if "routes" in arrays:
        routes = Routes(arrays.pop("routes"), arrays.pop("routes_known"))
    return Rollout(prompt=prompt, sample_index=index, routes=routes, **facts, **arrays)
