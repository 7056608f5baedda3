"""The layout of `--rl-layout auto`: the first of `search`, with as few savings as possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mcore_rl.planner.advice import savings_of_training
from mcore_rl.planner.defaults import with_packed_tokens
from mcore_rl.planner.layouts import with_training
from mcore_rl.planner.phases import Case
from mcore_rl.planner.search import search
from mcore_rl.planner.step_seconds import Step

_OFFLOAD = "--optimizer-cpu-offload"
# Each is added to those before it, if nothing fits without it.
IN_ORDER = (
    "--recompute-granularity",
    "--grad-reduce-in-bf16",
    "--use-precision-aware-optimizer",
    _OFFLOAD,
)
# Tokens of a packed micro-batch that fill a device. Only an optimizer on the host costs more time
# than smaller ones.
GOOD_TOKENS = 8192
_MOST_TIMES = 64  # as many devices are tried, to say how many would do


def best_layout(
    case: Case, step: Step, *, longest: int, savings: Sequence[str] = IN_ORDER
) -> str | None:
    """Return the flags of the layout that ranks first for the job of `case`, and of the savings
    that it needs; None if none fits.

    `longest` is the longest sample, which a packed micro-batch must hold; `savings` are those of
    `IN_ORDER` that the machine has.
    """
    for flags, other in _tries(case, step, longest, savings):
        candidates = search(other, step, top=1, chooses_share=True).candidates
        if candidates:
            return f"{candidates[0].flags}{flags}"
    return None


def least_world(
    case: Case, step: Step, *, longest: int, savings: Sequence[str] = IN_ORDER
) -> int | None:
    """Return the least doubled number of devices for which all savings together fit."""
    *_, (_, last) = _tries(case, step, longest, savings)
    size = case.train.world_size
    while size < _MOST_TIMES * case.train.world_size:
        size *= 2
        wider = replace(
            last,
            train=replace(last.train, world_size=size),
            rollout=replace(last.rollout, world_size=size, rank_map=()),
        )
        if search(wider, step, top=1, chooses_share=True).candidates:
            return size
    return None


def _tries(
    case: Case, step: Step, longest: int, savings: Sequence[str]
) -> Iterator[tuple[str, Case]]:
    """Yield the case with ever more savings and smaller micro-batches, and their flags, with a
    space before."""
    if not case.training.packed_tokens:
        yield from _with_savings(case, savings)
        return
    samples = step.samples // step.mini_batches
    if longest < GOOD_TOKENS:
        good = with_packed_tokens(case, GOOD_TOKENS, samples)
        yield from _with_savings(good, [name for name in savings if name != _OFFLOAD])
    yield from _with_savings(with_packed_tokens(case, longest, samples), savings)


def _with_savings(case: Case, savings: Sequence[str]) -> Iterator[tuple[str, Case]]:
    added = ""
    yield added, case
    for name in savings:
        for flags, change in savings_of_training(case.training):
            if flags.startswith(name):
                case, added = with_training(case, change), f"{added} {flags}"
                yield added, case
                break
