"""The command line, by the checks of a start, without stopping at the first fault.

A flag that is wrong by itself is reported and left out, and the checks continue without it; checks
that depend on it are skipped.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from mcore_rl.common.errors import UsageError
from mcore_rl.common.machine import machine_memory
from mcore_rl.common.platform import Platform
from mcore_rl.config import flags
from mcore_rl.flags.classes import notes
from mcore_rl.flags.megatron_flags import SHARED_RL
from mcore_rl.flags.parsed_flags import FlagNames, expand_config, import_given_files
from mcore_rl.job.choices import choose, with_chosen
from mcore_rl.job.facts import Facts, Refusals, Source
from mcore_rl.job.reading import make_parser
from mcore_rl.job.resolver import examine
from mcore_rl.tools.doctor.finding import Finding, Report, green, plural, red, refusal, yellow

# Areas of findings that are about the content of a folder, by the flag that names it.
_AREAS = {
    **dict.fromkeys(("--rl-hf-checkpoint", "--rl-export-dtype"), "checkpoint"),
    "--rl-reward-model": "reward",
}
# Flags without an effect on a machine with a GPU, and on one without.
_NO_EFFECT = {
    True: {"rl_rollout_kv_cache_gib": "sizes the engine's cache where there is no GPU"},
    False: {
        "rl_rollout_gpu_memory_utilization": "is a share of a GPU's memory",
        "rl_rollout_enforce_eager": "is always set without a GPU",
        "rl_rollout_offload_cuda_graphs": "is for graphs of a GPU",
    },
}


def check_taken_flags(parser: argparse.ArgumentParser) -> Iterator[Finding]:
    """Report mcore_rl's flags that a parser, Megatron's or a fork's, already has."""
    ours = [parameter.flag for parameter in flags().values()] + ["--rl-config"]
    theirs = parser._option_string_actions
    taken = [flag for flag in ours if flag in theirs and theirs[flag].dest not in SHARED_RL]
    for flag in taken:
        what = f"{flag} is also a flag of the installed Megatron, and mcore_rl needs the name"
        yield red("flags", what, "rename it, or install the Megatron of scripts/setup_env.sh")
    if not taken:
        yield green("flags", f"Megatron has none of our {len(ours)} flags")


def check_flags(
    report: Report,
    tokens: Sequence[str],
    *,
    world_size: int,
    platform: Platform,
    environment: Mapping[str, str],
    device_bytes: int | None = None,
) -> Facts:
    """Report all refusals of a job of `world_size` ranks, and its flags without effect. Return what
    is known of the job without the refused flags, with those that its start would choose for
    devices of `device_bytes`, or for this machine without devices."""
    parser = make_parser()
    refusals = _Collected(report, parser)
    import_given_files(tokens, refused=refusals.note)
    refusals.tokens = expand_config(tokens, parser, refused=refusals.note)
    size: Callable[[], int] | None = None if device_bytes is None else lambda: device_bytes
    source = Source(platform=platform, world_size=world_size, parser=parser)
    facts, chosen = refusals.examine(
        source, replace(source, host_memory=machine_memory, device_bytes=size)
    )
    report.findings += _given_twice(tokens, parser)
    report.findings += _without_effect(facts, platform.cuda)
    text = environment.get("WORLD_SIZE")
    if text is not None and text != str(world_size):
        what = f"the environment has WORLD_SIZE={text}, and --world-size is {world_size}"
        remedy = "unset RANK, WORLD_SIZE and LOCAL_RANK, the launcher sets them"
        report.findings.append(yellow("flags", what, remedy))
    if not refusals.noted:
        how = "by all checks of a start" if facts.spec else "as far as they can be checked"
        what = f"the flags are valid for {plural(world_size, 'rank')}, {how}"
        what += f"; the plan chooses {' '.join(chosen)}" if chosen else ""
        report.findings.append(green("flags", what))
    return facts


class _Collected(Refusals):
    """Reports refusals, and leaves out the flags that cause them."""

    def __init__(self, report: Report, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.tokens: list[str] = []
        self.noted: set[str] = set()
        self._report, self._parser = report, parser
        self._has_left_out = False

    def note(self, error: UsageError) -> None:
        """Report a mistake once, even if it is one of several models."""
        if error.found not in self.noted:
            self.noted.add(error.found)
            self._report.findings.append(refusal(_AREAS.get(error.flag_name, "flags"), error))

    def refuse(self, error: UsageError) -> None:
        """Report the mistake; the next round goes without a flag that is wrong by itself."""
        self.note(error)
        if self.examines_single_flags:
            self._leave_out(error)

    def examine(self, source: Source, chooses: Source) -> tuple[Facts, tuple[str, ...]]:
        """Return the facts of the tokens without the flags that are wrong by themselves, and the
        flags that a start would choose, from `chooses`."""
        while True:
            self.count, self._has_left_out = 0, False
            chosen = self.value(choose, replace(chooses, tokens=self.tokens)) or ()
            facts = examine(with_chosen(replace(source, tokens=self.tokens), chosen), self)
            if not self._has_left_out:
                return facts, chosen

    def _leave_out(self, error: UsageError) -> None:
        """Remove the flag at fault and its values, if it is given."""
        names = {error.flag, error.flag_name}
        action = self._parser._option_string_actions.get(error.flag_name)
        if action is not None:
            names.update(action.option_strings)
            self.left_out |= {action.dest}
        kept, dropping = [], False
        for token in self.tokens:
            if token.startswith("--") or token.split("=")[0] in names:
                dropping = token.split("=")[0] in names
            if not dropping:
                kept.append(token)
        self._has_left_out |= len(kept) < len(self.tokens)
        self.tokens = kept


def _given_twice(tokens: Sequence[str], parser: argparse.ArgumentParser) -> Iterator[Finding]:
    known, names = parser._option_string_actions, FlagNames(parser)
    given = [known.get(token.split("=")[0]) for token in tokens if token.startswith("--")]
    times = Counter(action.dest for action in given if action)
    for dest, count in times.items():
        if count > 1 and dest not in ("rl_config", "rl_import_"):  # which add up
            what = f"{names[dest]} is given {count} times, and the last one counts"
            yield yellow("flags", what, "drop one")


def _without_effect(facts: Facts, has_cuda: bool) -> Iterator[Finding]:
    unread = facts.derived.unread if facts.derived else frozenset()
    for line in notes(facts.given, facts.parser, unread=unread):
        yield yellow("flags", line, "drop them, or read docs/using/megatron_flags.md")
    here = "with a GPU" if has_cuda else "without a GPU"
    for dest, why in _NO_EFFECT[has_cuda].items():
        if dest in facts.given:
            what = f"{FlagNames(facts.parser)[dest]} has no effect on a machine {here}: it {why}"
            yield yellow("flags", what, "drop it here")
