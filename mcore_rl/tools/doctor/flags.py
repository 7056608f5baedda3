"""Check of the command line, by the checks of a start, without stopping at the first fault.

A flag that is wrong by itself is reported and removed, and the checks continue without it; checks
that depend on it are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import Platform
from mcore_rl.config import RLConfig, flags
from mcore_rl.flags.classes import notes
from mcore_rl.flags.given import FlagNames, expand_config, import_given_files
from mcore_rl.flags.megatron_flags import SHARED_RL
from mcore_rl.job.reading import make_parser
from mcore_rl.job.resolver import Facts, Refusals, Source, examine
from mcore_rl.job.value_models import Folder
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, TrainLayout
from mcore_rl.spec import JobSpec
from mcore_rl.tools.doctor.finding import (
    CHECKPOINT,
    FLAGS,
    REWARD,
    Finding,
    green,
    plural,
    red,
    refusal,
    yellow,
)

# Areas of findings that are about the content of a folder, by the flag that names it.
_AREAS = {
    "--rl-hf-checkpoint": CHECKPOINT,
    "--rl-export-dtype": CHECKPOINT,
    "--rl-reward-model": REWARD,
}
# Flags without an effect on a machine with a GPU, and on one without.
_NO_EFFECT = {
    True: {"rl_rollout_kv_cache_gib": "sizes the engine's cache where there is no GPU"},
    False: {
        "rl_rollout_gpu_memory_utilization": "is a share of a GPU's memory",
        "rl_rollout_enforce_eager": "is always so without a GPU",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadJob:
    """The facts of a command line; None for those that a fault prevents."""

    findings: tuple[Finding, ...]
    config: RLConfig | None = None
    tokens: tuple[str, ...] = ()  # without wrong flags, --rl-config expanded
    values: Mapping[str, Any] = field(default_factory=dict)  # all flags by destination
    shape: ModelShape | None = None
    checkpoint: HFCheckpoint | None = None
    layout: TrainLayout | None = None
    layers: PipelineLayers | None = None
    batch_is_right: bool = False
    reward_model: Folder | None = None  # from --rl-reward-model
    spec: JobSpec | None = None  # set if every check passed, as in a start


def taken_flags(parser: argparse.ArgumentParser) -> list[Finding]:
    """Report mcore_rl's flags that a parser, Megatron's or a fork's, already has."""
    ours = [parameter.flag for parameter in flags().values()] + ["--rl-config"]
    theirs = parser._option_string_actions
    taken = [flag for flag in ours if flag in theirs and theirs[flag].dest not in SHARED_RL]
    return [
        red(
            FLAGS,
            f"{flag} is a flag of the installed Megatron, too, and mcore_rl needs the name",
            "rename the other one, or install the Megatron of scripts/setup_env.sh",
        )
        for flag in taken
    ] or [green(FLAGS, f"Megatron has none of our {len(ours)} flags")]


def check_parser() -> list[Finding]:
    """Report `taken_flags` of the installed Megatron."""
    return taken_flags(megatron_adapter.make_parser())


def read_job(
    tokens: Sequence[str], *, world_size: int, platform: Platform, environment: Mapping[str, str]
) -> ReadJob:
    """Examine the flags of a job of `world_size` ranks."""
    refused: list[UsageError] = []
    import_given_files(tokens, refused=refused.append)
    parser = make_parser()
    reader = _Reader(parser)
    for error in refused:
        reader.note(error)
    reader.tokens = expand_config(tokens, parser, refused=reader.note)
    with _environment_kept():
        facts = reader.read(world_size, platform)
    more = [
        *_given_twice(tokens, parser),
        *_without_effect(facts, parser, platform.cuda),
        *_from_environment(environment, world_size),
    ]
    found = [*reader.findings, *more]
    spec = facts.spec
    if not any(finding.level == "red" for finding in found):
        how = "as the start checks them" if spec else "as far as they can be checked"
        found.append(green(FLAGS, f"the flags are right for {plural(world_size, 'rank')}, {how}"))
    return ReadJob(
        findings=tuple(found),
        tokens=tuple(reader.tokens),
        config=facts.config,
        values=facts.values or facts.given,
        shape=facts.shape,
        checkpoint=facts.checkpoint,
        layout=facts.layout,
        layers=facts.layers,
        batch_is_right=facts.batches_are_right,
        reward_model=facts.reward_model_folder,
        spec=spec,
    )


class _Reader(Refusals):
    """Collects refusals, and leaves out the flags that cause them."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.tokens: list[str] = []
        self._parser = parser
        self._noted: set[str] = set()
        self._has_left_out = False

    def note(self, error: UsageError) -> None:
        """Report a mistake once, even if it is one of several models."""
        if error.found not in self._noted:
            self._noted.add(error.found)
            self.findings.append(refusal(_AREAS.get(error.flag_name, FLAGS), error))

    def refuse(self, error: UsageError) -> None:
        """Report the mistake; the next round goes without a flag that is wrong by itself."""
        self.note(error)
        if self.examines_single_flags:
            self._has_left_out |= self._leave_out(error)

    def read(self, world_size: int, platform: Platform) -> Facts:
        """Return the facts of the tokens without the flags that are wrong by themselves."""
        while True:
            self.count, self._has_left_out = 0, False
            source = Source(
                tokens=self.tokens, platform=platform, world_size=world_size, parser=self._parser
            )
            facts = examine(source, self)
            if not self._has_left_out:
                return facts

    def _leave_out(self, error: UsageError) -> bool:
        """Remove the flag at fault and its values; return False if it is not given."""
        names = {error.flag, error.flag_name}
        action = self._parser._option_string_actions.get(error.flag_name)
        if action is not None:
            names.update(action.option_strings)
            self.left_out |= {action.dest}
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
    names = FlagNames(parser)
    return [
        yellow(FLAGS, f"{names[dest]} is given {count} times, and the last one counts", "drop one")
        for dest, count in times.items()
        if count > 1
    ]


def _without_effect(facts: Facts, parser: argparse.ArgumentParser, has_cuda: bool) -> list[Finding]:
    given = facts.given
    unread = facts.derived.unread if facts.derived else frozenset()
    here = "with a GPU" if has_cuda else "without a GPU"
    names = FlagNames(parser)
    said = [
        yellow(FLAGS, line, "drop them, or read docs/using/megatron_flags.md")
        for line in notes(given, parser, unread=unread)
    ]
    return said + [
        yellow(FLAGS, f"{names[dest]} has no effect on a machine {here}: it {why}", "drop it here")
        for dest, why in _NO_EFFECT[has_cuda].items()
        if dest in given
    ]


def _from_environment(environment: Mapping[str, str], world_size: int) -> list[Finding]:
    """Warn about a launcher's variable in the environment that starts a launcher."""
    text = environment.get("WORLD_SIZE")
    if text is None or text == str(world_size):
        return []
    what = f"the environment has WORLD_SIZE={text}, and --world-size is {world_size}"
    return [yellow(FLAGS, what, "unset RANK, WORLD_SIZE and LOCAL_RANK, the launcher sets them")]
