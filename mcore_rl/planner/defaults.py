"""Values of flags that nobody gave, from the plan: micro-batches, vLLM's share, sequences.

All are the same for the same job on devices (or hosts) of the same size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mcore_rl.planner.host import host_phases
from mcore_rl.planner.layouts import with_training
from mcore_rl.planner.memory import Memory, memory_of, resident_of
from mcore_rl.planner.phases import LOG_PROBS, SCORES, TRAIN, TRAIN_CRITIC, VALUES, Case
from mcore_rl.planner.settings import TrainSettings

# Tokens of a packed micro-batch that are tried. More fill a device no better; on the cores of a
# CPU, larger ones are no faster, and only take memory.
PACKED_TOKENS = (16384, 8192, 4096, 2048, 1024)
PACKED_TOKENS_ON_CPU = (2048, 1024)
# vLLM's share of a device and the sequences of an engine are at most these.
MOST_UTILIZATION, MOST_SEQS = 0.9, 1024
PASSES = (LOG_PROBS, VALUES, SCORES, TRAIN, TRAIN_CRITIC)


@dataclass(frozen=True, slots=True)
class Host:
    """The host memory of a machine without devices, as `host_phases` takes it, and its limit."""

    usable_bytes: float
    kv_cache_bytes: int
    widens: bool


def packed_tokens(case: Case, *, longest: int, samples: int, host: Host | None) -> int:
    """Return the tokens of a packed micro-batch: the most that fit, at least `longest`.

    `case` packs already; `longest` is its longest sample with padding, and `samples` are those of a
    mini-batch, of which a micro-batch holds no more than a data-parallel rank has. Without devices
    the `host` counts.
    """
    most = longest * math.ceil(samples / case.train.dp_size)
    for tokens in PACKED_TOKENS if host is None else PACKED_TOKENS_ON_CPU:
        if tokens <= longest:
            break
        # The next smaller size may hold all samples of a rank, too.
        if tokens // 2 < most and _fits(with_packed_tokens(case, tokens, samples), host):
            return tokens
    return longest


def with_packed_tokens(case: Case, tokens: int, samples: int) -> Case:
    """Return the case with micro-batches of at most this many tokens, of `samples` a mini-batch."""

    def change(settings: TrainSettings) -> TrainSettings:
        packed = replace(settings, packed_tokens=tokens)
        count = packed.micro_batches_of(samples, case.train.dp_size)
        return replace(packed, num_micro_batches=count)

    return with_training(case, change)


def _fits(case: Case, host: Host | None) -> bool:
    if host is None:
        phases = memory_of(case, resident_of(case)).phases
        return not any(phase.lacking_bytes for phase in phases if phase.name in PASSES)
    usable = host.usable_bytes
    if case.is_separate:  # their ranks may all be on one machine, with trainers
        usable -= len(case.engine_ranks) * (int(resident_of(case).max()) + host.kv_cache_bytes)
        case = replace(case, has_engines=False, engine_ranks=())
    needs = host_phases(case, kv_cache_bytes=host.kv_cache_bytes, widens=host.widens)
    return max(phase.total_bytes for phase in needs) <= usable


def with_utilization(case: Case, memory: Memory) -> Case:
    """Return the case with the largest share of a device for vLLM that leaves enough for training,
    in hundredths; the same if nothing is left. `memory` is that of the case with any share."""
    share = math.floor(100 * min(MOST_UTILIZATION, memory.kv_cache.useful_utilization)) / 100
    if share <= 0:
        return case
    return replace(case, engine=replace(case.engine, gpu_memory_utilization=share))


def num_seqs(case: Case, *, most_in_flight: int, kv_cache_bytes: int | None = None) -> int:
    """Return how many sequences an engine computes at once: all that it can have, at most
    `MOST_SEQS` and those that its KV cache holds at half of their greatest length.

    `most_in_flight` are those of all engines; `kv_cache_bytes` of a rank without devices.
    """
    if kv_cache_bytes is None:
        kv_cache_bytes = memory_of(case, resident_of(case)).kv_cache.num_bytes
    cached = 2 * kv_cache_bytes // max(1, case.sample_bytes)
    own = math.ceil(most_in_flight / case.rollout.num_tp_groups)
    return max(1, min(own, cached, MOST_SEQS))
