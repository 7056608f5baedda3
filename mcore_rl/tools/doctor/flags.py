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
from mcore_rl.flags.classes import notes
from mcore_rl.flags.given import FlagNames, expand_config, import_given_files
from mcore_rl.flags.megatron_flags import SHARED_RL
from mcore_rl.flags.options import RLConfig, flags
from mcore_rl.job.checks import Check
from mcore_rl.job.reading import make_parser
from mcore_rl.job.resolver import facts_of_tokens, resolve
from mcore_rl.job.spec import JobSpec
from mcore_rl.job.value_models import Folder
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, TrainLayout
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

# Areas of checks whose findings are not about flags, by the fact that they give.
_AREAS = {
    "shape": CHECKPOINT,
    "checkpoint": CHECKPOINT,
    "export_dtype": CHECKPOINT,
    "reward_model_shape": REWARD,
    "reward_model_folder": REWARD,
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
        facts = reader.resolved(world_size, platform)
    more = [
        *_given_twice(tokens, parser),
        *_without_effect(facts, parser, platform.cuda),
        *_from_environment(environment, world_size),
    ]
    found = [*reader.findings, *more]
    spec = facts.get("spec")
    if not any(finding.level == "red" for finding in found):
        how = "as the start checks them" if spec else "as far as they can be checked"
        found.append(green(FLAGS, f"the flags are right for {plural(world_size, 'rank')}, {how}"))
    return ReadJob(
        findings=tuple(found),
        tokens=tuple(reader.tokens),
        config=facts.get("config"),
        values=facts.get("values") or facts.get("given", {}),
        shape=facts.get("shape"),
        checkpoint=facts.get("checkpoint"),
        layout=facts.get("layout"),
        layers=facts.get("layers"),
        batch_is_right="batches" in facts,
        reward_model=facts.get("reward_model_folder"),
        spec=spec,
    )


class _Reader:
    """Collector of refusals, which removes the flags that cause them."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.findings: list[Finding] = []
        self.tokens: list[str] = []
        self._dropped: set[str] = set()  # destinations
        self._parser = parser
        self._told: set[str] = set()

    def note(self, error: UsageError, area: str = FLAGS) -> None:
        """Report a mistake once."""
        if str(error) not in self._told:
            self._told.add(str(error))
            self.findings.append(refusal(area, error))

    def resolved(self, world_size: int, platform: Platform) -> dict[str, Any]:
        """Return the facts of the tokens without the flags that are wrong by themselves."""
        has_taken = False

        def refused(check: Check, error: UsageError) -> None:
            nonlocal has_taken
            self.note(error, _AREAS.get(check.gives, FLAGS))
            has_taken |= check.alone and self._take_away(error)

        while True:
            has_taken = False
            facts = facts_of_tokens(self.tokens, platform=platform, world_size=world_size)
            facts["parser"] = self._parser
            facts = resolve(facts, refused=refused, unknown=self._dropped)
            if not has_taken:
                return facts

    def _take_away(self, error: UsageError) -> bool:
        """Remove the flag at fault and its values; return False if it is not given."""
        names = {error.flag, error.flag_name}
        action = self._parser._option_string_actions.get(error.flag_name)
        if action is not None:
            names.update(action.option_strings)
            self._dropped.add(action.dest)
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


def _without_effect(
    facts: Mapping[str, Any], parser: argparse.ArgumentParser, has_cuda: bool
) -> list[Finding]:
    given = facts.get("given", {})
    unread = facts["derived"].unread if "derived" in facts else frozenset()
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
