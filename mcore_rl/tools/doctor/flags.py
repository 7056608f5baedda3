"""The command line, by the checks of a start, so that one fault does not hide the next.

A flag that is wrong by itself is taken away once it is told, and the checks go on without it; what
depends on it is left alone. If layout and batch are right, the whole check of a start comes last,
Megatron's own validation included.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import Platform
from mcore_rl.flags.classes import check_no_megatron_rl_flag, notes
from mcore_rl.flags.derived import derive_flags
from mcore_rl.flags.fsdp import check_fsdp
from mcore_rl.flags.given import (
    expand_config,
    flag_names,
    given_values,
    import_given_files,
)
from mcore_rl.flags.options import RLConfig, config_from, flags
from mcore_rl.flags.roles import Roles, parse_roles
from mcore_rl.hybrid_engine.memory.offload import offload_kinds
from mcore_rl.job import preflight
from mcore_rl.job.layout import check_batches, check_rollout, check_stages
from mcore_rl.job.preflight import Checked
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, TrainLayout
from mcore_rl.roles.reward_model import check_reward_model_flags
from mcore_rl.roles.world import world_of_size
from mcore_rl.tools.doctor.finding import (
    CHECKPOINT,
    FLAGS,
    Finding,
    green,
    plural,
    red,
    refusal,
    yellow,
)

T = TypeVar("T")

_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_STRAY = re.compile(r"'([^']*)' belongs to no flag")
# Others depend on these: without them nothing can be said of layout, batch and lengths.
_LAYOUT = re.compile(
    r"parallel_size|pipeline|virtual|^rl_(rollout_|critic_|reward_)?(ranks|[te]p_)"
)
_BATCH = re.compile(r"batch|^rl_(num_prompts|num_samples|algorithm|share_prompts|max_tokens)")
_LENGTHS = re.compile(r"^rl_max_(prompt|response)_tokens|^rl_max_tokens|context_parallel")
# Flags without an effect on a machine with a GPU, and on one without.
_NO_EFFECT = {
    True: {"rl_rollout_kv_cache_gib": "sizes the engine's cache where there is no GPU"},
    False: {
        "rl_rollout_gpu_memory_utilization": "is a share of a GPU's memory",
        "rl_rollout_enforce_eager": "is always so without a GPU",
    },
}


@dataclass(frozen=True, slots=True)
class ReadJob:
    """What could be understood of a command line; None where a fault stands before it."""

    findings: tuple[Finding, ...]
    config: RLConfig | None = None
    tokens: tuple[str, ...] = ()  # without what is wrong, --rl-config written out
    values: Mapping[str, Any] = field(default_factory=dict)  # all flags by destination
    shape: ModelShape | None = None
    checkpoint: HFCheckpoint | None = None
    layout: TrainLayout | None = None
    layers: PipelineLayers | None = None
    batch_is_right: bool = False
    checked: Checked | None = None  # passed as a whole, as a start would


def taken_flags(parser: argparse.ArgumentParser) -> list[Finding]:
    """Flags of ours that a parser, Megatron's or a fork's, has already."""
    ours = [parameter.flag for parameter in flags().values()] + ["--rl-config"]
    taken = [flag for flag in ours if flag in parser._option_string_actions]
    return [
        red(
            FLAGS,
            f"{flag} is a flag of the installed Megatron, too, and mcore_rl needs the name",
            "rename the other one, or install the Megatron of scripts/setup_env.sh",
        )
        for flag in taken
    ] or [green(FLAGS, f"Megatron has none of our {len(ours)} flags")]


def check_parser() -> list[Finding]:
    """`taken_flags` of the installed Megatron."""
    return taken_flags(megatron_adapter.make_parser())


def read_job(
    tokens: Sequence[str], *, world_size: int, platform: Platform, environment: Mapping[str, str]
) -> ReadJob:
    """Examine the flags of a job of `world_size` ranks."""
    refused: list[UsageError] = []
    import_given_files(tokens, refused=refused.append)
    parser = preflight.make_parser()
    reader = _Reader(parser)
    for error in refused:
        reader.note(error)
    reader.tokens = expand_config(tokens, parser, refused=reader.note)
    with world_of_size(world_size):
        job = _read(reader, world_size, platform)
    more = [
        *_given_twice(tokens, parser),
        *_without_effect(given_values(job.tokens, parser), parser, platform.cuda),
        *_from_environment(environment, world_size),
    ]
    found = [*reader.findings, *more]
    if not any(finding.level == "red" for finding in found):
        how = "as the start checks them" if job.checked else "as far as they can be checked"
        found.append(green(FLAGS, f"the flags are right for {plural(world_size, 'rank')}, {how}"))
    return dataclasses.replace(job, findings=tuple(found))


class _Reader:
    """Collects refusals, and takes away the flags that cause them."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.findings: list[Finding] = []
        self.tokens: list[str] = []
        self.dropped: set[str] = set()  # destinations
        self.parser = parser
        self._told: set[str] = set()

    def note(self, error: UsageError, area: str = FLAGS) -> None:
        """Tell a mistake, once."""
        if str(error) not in self._told:
            self._told.add(str(error))
            self.findings.append(refusal(area, error))

    def attempt(self, check: Callable[[], T], area: str = FLAGS) -> T | None:
        """What `check` returns; None where it refuses."""
        try:
            return check()
        except UsageError as error:
            self.note(error, area)
            return None

    def until_accepted(self, check: Callable[[dict[str, Any]], T]) -> T | None:
        """Call `check` on the flags given, again without each one that it refuses by name; None
        where it refuses something else."""
        while True:
            try:
                return check(given_values(self.tokens, self.parser))
            except UsageError as error:
                self.note(error)
                if not self._take_away(str(error)):
                    return None

    def is_untouched(self, *patterns: re.Pattern[str]) -> bool:
        """Whether no flag of these kinds was taken away."""
        return not any(p.search(dest) for p in patterns for dest in self.dropped)

    def _take_away(self, sentence: str) -> bool:
        """Remove the flag that a sentence begins with, and its values; False if it is not given."""
        names = {match[0] for match in [_FLAG.search(sentence)] if match}
        if match := _STRAY.match(sentence):
            names = {match[1]}
        for name in list(names):
            action = self.parser._option_string_actions.get(name)
            if action is not None:
                names.update(action.option_strings)
                self.dropped.add(action.dest)
        kept, dropping = [], False
        for token in self.tokens:
            if token.split("=")[0] in names:
                dropping = True
            elif token.startswith("--"):
                dropping = False
            if not dropping:
                kept.append(token)
        found = len(kept) < len(self.tokens)
        self.tokens = kept
        return found


def _read(reader: _Reader, world_size: int, platform: Platform) -> ReadJob:
    parser, attempt = reader.parser, reader.attempt
    for check in (
        lambda given: check_no_megatron_rl_flag(given, parser),
        lambda given: preflight.check_ranges(config_from(given)),
        lambda given: check_reward_model_flags(config_from(given)),
        preflight.check_switches,
    ):
        reader.until_accepted(check)
    given = given_values(reader.tokens, parser)
    config = config_from(given)
    attempt(lambda: preflight.check_outputs(config, given))
    read = attempt(lambda: preflight.read_checkpoint(config), CHECKPOINT)
    job = ReadJob((), config, tuple(reader.tokens), given)
    if read is None:
        return job
    shape, checkpoint = read

    def derived_values(given: dict[str, Any]) -> dict[str, Any]:
        derived = derive_flags(shape, config, given, parser=parser, platform=platform)
        return {**given_values(derived.tokens, parser), **given}

    values = reader.until_accepted(derived_values)
    job = dataclasses.replace(
        job, tokens=tuple(reader.tokens), values=values or {}, shape=shape, checkpoint=checkpoint
    )
    if values is None:
        return job
    if reader.is_untouched(_LENGTHS):
        cp_size = values.get("context_parallel_size", 1)
        attempt(lambda: preflight.check_lengths(config, shape, cp_size=cp_size))
    return _read_layout(reader, job, world_size, platform)


def _read_layout(reader: _Reader, job: ReadJob, world_size: int, platform: Platform) -> ReadJob:
    attempt, values = reader.attempt, job.values
    config, shape = job.config, job.shape
    assert config is not None and shape is not None
    _check_fsdp(reader, values, platform)
    attempt(lambda: offload_kinds(config.offload, values, has_cuda=platform.cuda))
    if not reader.is_untouched(_LAYOUT):
        return job
    ranks = (world_size, config.critic_ranks, config.reward_ranks)
    roles: Roles | None = attempt(lambda: parse_roles(*ranks))
    layout = roles and attempt(lambda: preflight.actor_layout(shape, values, roles))
    pp_size = values.get("pipeline_model_parallel_size", 1)
    layers = attempt(lambda: check_stages(shape, pp_size, values))
    if not layout or not layers:
        return job
    rollout = attempt(
        lambda: check_rollout(config, shape, layout, layers, has_cuda=platform.cuda),
    )
    batch = reader.is_untouched(_BATCH)
    if batch:
        batch = attempt(lambda: check_batches(config, layout, values) or True) is True
    job = dataclasses.replace(job, layout=layout, layers=layers, batch_is_right=batch)
    if rollout is None or not batch or not reader.is_untouched(_LENGTHS):
        return job
    tokens = job.tokens
    checked = attempt(lambda: preflight.check_command_line(tokens, platform=platform))
    return dataclasses.replace(job, checked=checked)


def _check_fsdp(reader: _Reader, values: Mapping[str, Any], platform: Platform) -> None:
    with _environment_kept():
        if values.get("use_megatron_fsdp"):
            megatron_adapter.allow_many_queues()
        reader.attempt(lambda: check_fsdp(values, os.environ, platform=platform))


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _given_twice(tokens: Sequence[str], parser: argparse.ArgumentParser) -> list[Finding]:
    known = parser._option_string_actions
    flags = [known.get(token.split("=")[0]) for token in tokens if token.startswith("--")]
    added_up = ("rl_config", "rl_import_")
    times = Counter(a.dest for a in flags if a is not None and a.dest not in added_up)
    names = flag_names(parser)
    return [
        yellow(FLAGS, f"{names[dest]} is given {count} times, and the last one counts", "drop one")
        for dest, count in times.items()
        if count > 1
    ]


def _without_effect(
    given: Mapping[str, Any], parser: argparse.ArgumentParser, has_cuda: bool
) -> list[Finding]:
    here = "with a GPU" if has_cuda else "without a GPU"
    names = flag_names(parser)
    said = [
        yellow(FLAGS, line, "drop them, or read docs/using/megatron_flags.md")
        for line in notes(given, parser)
    ]
    return said + [
        yellow(FLAGS, f"{names[dest]} has no effect on a machine {here}: it {why}", "drop it here")
        for dest, why in _NO_EFFECT[has_cuda].items()
        if dest in given
    ]


def _from_environment(environment: Mapping[str, str], world_size: int) -> list[Finding]:
    """What a launcher sets, and has no place in the environment that starts one."""
    text = environment.get("WORLD_SIZE")
    if text is None or text == str(world_size):
        return []
    what = f"the environment has WORLD_SIZE={text}, and --world-size is {world_size}"
    return [yellow(FLAGS, what, "unset RANK, WORLD_SIZE and LOCAL_RANK, the launcher sets them")]
