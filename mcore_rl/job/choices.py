"""Flags that a start adds by the plan of its job, where nobody gave them: `choose`.

They stand in front of the user's, so that all that follows, config.yaml of a run included, takes
them as given. Rank 0 chooses for all ranks.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.errors import UsageError, as_flag
from mcore_rl.config import RLConfig
from mcore_rl.flags.parsed_flags import expand_config, given_values, without_flags
from mcore_rl.job import reading
from mcore_rl.job.batches import longest_row
from mcore_rl.job.facts import LAYOUT, Facts, Refusals, Source
from mcore_rl.job.memory import kv_cache_bytes, planned_case
from mcore_rl.job.resolver import examine
from mcore_rl.observe.run_directory import CONFIG_FILE, read_config
from mcore_rl.planner import defaults
from mcore_rl.planner.auto_layout import IN_ORDER, best_layout, least_world
from mcore_rl.planner.memory import memory_of, resident_of
from mcore_rl.planner.phases import Case
from mcore_rl.planner.settings import (
    GB,
    GPU,
    GPUS,
    HOST_RESERVED_GB,
)
from mcore_rl.planner.step_seconds import Step
from mcore_rl.trainer.plan_inputs import has_slow_products

PACKED = "--rl-max-tokens-per-microbatch"
UTILIZATION = "--rl-rollout-gpu-memory-utilization"
SEQS = "--rl-rollout-max-num-seqs"
_ANY_LENGTH = (1 << 31) - 1  # of PACKED, while the plan has not chosen
_PADS = frozenset({"micro_batch_size", "rl_max_tokens_per_microbatch"})
_AUTO = "--rl-layout auto"


def choose(source: Source) -> tuple[str, ...]:
    """Return the tokens of the flags that the plan chooses, by `choose_layout` and
    `choose_defaults`; those of an earlier start in the same run directory, if it had as many ranks.

    A job that is refused has none, and its start says why; nor has one that the planner does not
    know. UsageError: --rl-layout auto finds no layout, or parallel sizes are given beside it.
    """
    if reading.asks_for_help(source.tokens):
        return ()
    if kept := _kept(source):
        return kept
    layout = choose_layout(source)
    return (*layout, *choose_defaults(with_chosen(source, layout)))


def choose_layout(source: Source) -> tuple[str, ...]:
    """Return the flags of the layout of --rl-layout auto; nothing without that flag."""
    given = _given(source)
    if given is None or given.get("rl_layout") != "auto" or source.args is not None:
        return ()
    for dest, value in given.items():
        if LAYOUT.search(dest) and dest != "rl_ranks_per_node" and value is not None:
            raise UsageError(
                f"fixes a part of the layout that {_AUTO} chooses",
                flag=as_flag(dest, value),
                remedy="drop one of the two",
            )
    packs = () if given.keys() & _PADS else (PACKED, str(_ANY_LENGTH))
    facts = _planned(replace(with_chosen(source, packs), checks_batches=False))
    return () if facts is None else _layout(source, facts)


def choose_defaults(source: Source) -> tuple[str, ...]:
    """Return PACKED, UTILIZATION and SEQS with their values, those that are not given.

    Samples are padded where a flag does not allow to pack them.
    """
    given = _given(source)
    if given is None:
        return ()
    for packs in ((),) if given.keys() & _PADS else ((PACKED, str(_ANY_LENGTH)), ()):
        facts = _planned(with_chosen(source, packs))
        if facts is not None:
            chosen = _chosen(source, facts, given, packs=bool(packs))
            return tuple(text for pair in chosen.items() for text in pair)
    return ()


def with_chosen(source: Source, chosen: Sequence[str]) -> Source:
    """Return the source with these flags, which a fork's arguments get as values; --rl-layout auto
    is left out, as it is done."""
    if not chosen:
        return source
    parser = _parser(source)
    if source.args is None:
        tokens = without_flags(expand_config(source.tokens, parser), parser, {"rl_layout"})
        return replace(
            source, tokens=(*chosen, *tokens), chosen=(*source.chosen, *chosen), parser=parser
        )
    args = argparse.Namespace(**{**vars(source.args), **given_values(chosen, parser)})
    return replace(source, args=args, chosen=(*source.chosen, *chosen), parser=parser)


def _parser(source: Source) -> argparse.ArgumentParser:
    return source.parser or reading.make_parser(source.extra_args)


def _given(source: Source) -> dict[str, Any] | None:
    """Return the given flags by destination; None if they are refused."""
    parser = _parser(source)
    try:
        if source.args is not None:
            return reading.given_in_fork(source.args, parser)
        return reading.given_in(expand_config(source.tokens, parser), parser)
    except UsageError:
        return None


def _kept(source: Source) -> tuple[str, ...]:
    """Return what an earlier start in the same run directory has chosen for as many ranks, unless
    the user gives some of it now."""
    given = _given(source) or {}
    if (folder := given.get("rl_run_dir")) is None:
        return ()
    try:
        about = read_config(Path(folder) / CONFIG_FILE).about
        kept = tuple(shlex.split(about.get("chosen") or ""))
        values = given_values(kept, _parser(source))
    except (OSError, ValueError, UsageError):
        return ()
    same = about.get("ranks") == source.world_size and not values.keys() & given.keys()
    return kept if same else ()


def _planned(source: Source) -> Facts | None:
    """Return the facts of a job by the checks of a plan, or None if it is refused. Memory is not
    checked: what is chosen may make it fit."""
    planned = replace(source, has_files=False, is_here=False, device_bytes=None, host_memory=None)
    try:
        return examine(planned, Refusals())
    except UsageError:
        return None


def _case(source: Source, facts: Facts) -> Case | None:
    assert facts.config is not None, "nothing was refused"
    size = None
    if source.platform.cuda:
        if source.device_bytes is None:
            return None
        size = source.device_bytes()
    return planned_case(facts.config, facts, size)


# ------------------------------------------------------------------------------- the layout


def _layout(source: Source, facts: Facts) -> tuple[str, ...]:
    config, case = facts.config, _case(source, facts)
    assert config is not None, "nothing was refused"
    if case is None:
        return ()
    step = Step(
        samples=config.samples_per_step,
        mini_batches=config.trainer.num_mini_batches,
        flops=GPUS[GPU].tflops * 1e12,
        memory_rate=GPUS[GPU].gb_per_second * GB,
    )
    # The last two are layers and optimizers of Transformer Engine.
    savings = IN_ORDER if source.platform.transformer_engine is not None else IN_ORDER[:2]
    longest = longest_row(config, 1)
    flags = best_layout(case, step, longest=longest, savings=savings)
    if flags is not None:
        return tuple(flags.split())
    least = least_world(case, step, longest=longest, savings=savings)
    raise UsageError(
        f"finds no layout of this model for {case.train.world_size} devices of "
        f"{shown_bytes(case.machine.gpu_bytes)}, with all that saves memory",
        flag=_AUTO,
        remedy=f"take {least} devices" if least else "take larger devices",
    )


# ----------------------------------------------------------------------- the other defaults


def _chosen(
    source: Source, facts: Facts, given: Mapping[str, Any], *, packs: bool
) -> dict[str, str]:
    config, case = facts.config, _case(source, facts)
    assert config and facts.actor, "nothing was refused"
    if case is None:
        return {}
    on_device = source.platform.cuda
    chosen: dict[str, str] = {}
    if packs:
        longest = longest_row(config, facts.actor.layout.cp_size)
        samples = config.samples_per_step // config.trainer.num_mini_batches
        host = None if on_device else _host(source, config)
        tokens = defaults.packed_tokens(case, longest=longest, samples=samples, host=host)
        case = defaults.with_packed_tokens(case, tokens, samples)
        chosen[PACKED] = str(tokens)
    if not case.has_engines:
        return chosen
    if on_device and "rl_rollout_gpu_memory_utilization" not in given:
        case = defaults.with_utilization(case, memory_of(case, resident_of(case)))
        chosen[UTILIZATION] = f"{case.engine.gpu_memory_utilization:g}"
    if "rl_rollout_max_num_seqs" not in given:
        cache = None if on_device else kv_cache_bytes(config)
        most = most_in_flight(config)
        chosen[SEQS] = str(defaults.num_seqs(case, most_in_flight=most, kv_cache_bytes=cache))
    return chosen


def _host(source: Source, config: RLConfig) -> defaults.Host:
    # By its limit: what is free changes, and with it the results of the same command.
    limit = math.inf if source.host_memory is None else source.host_memory().limit_bytes
    return defaults.Host(
        usable_bytes=limit - HOST_RESERVED_GB * GB,
        kv_cache_bytes=kv_cache_bytes(config),
        widens=has_slow_products(config.trainer.precision),
    )


def most_in_flight(config: RLConfig) -> int:
    """Return the most samples that all engines have at a time, in training or evaluation."""
    rollout, evaluation = config.rollout, config.evaluation
    ahead = 1 + rollout.staleness_limit if rollout.samples_ahead else rollout.groups_at_a_time
    evaluated = 0
    if config.data.eval_prompts is not None:
        evaluated = evaluation.num_eval_prompts * evaluation.eval_samples
    return max(math.ceil(ahead * config.samples_per_step), evaluated)
