"""Checks and notes of the tables in `megatron_flags`: flags that RL refuses, or that have no
effect."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mcore_rl.common.errors import CORRECT, UsageError, as_flag
from mcore_rl.common.parameters import Bounds
from mcore_rl.flags.megatron_flags import (
    ARCHITECTURE,
    HONOURED,
    OWN_RL,
    OWN_RL_REASON,
    RANGES,
    REFUSED,
    REFUSED_BY_MEGATRON,
    REFUSED_OTHERWISE,
    REFUSED_VALUES,
    SET_BY_VALIDATION,
    SHARED_RL,
    WITHOUT_EFFECT,
)
from mcore_rl.flags.parsed_flags import options_of
from mcore_rl.flags.parser import GROUP

_BOUNDS = {
    "at least 0": Bounds(least=0),
    "greater than 0": Bounds(above=0),
    "at least 0 and less than 1": Bounds(least=0, below=1),
    "at least 0 and at most 1": Bounds(least=0, most=1),
}
# The first of a pair must not be greater.
_ORDERED = (
    ("min_lr", "lr"),
    ("lr_warmup_init", "lr"),
    ("decoupled_min_lr", "decoupled_lr"),
    ("start_weight_decay", "end_weight_decay"),
    ("min_loss_scale", "initial_loss_scale"),
)
_FROM_CONFIG = "config.json decides: another value than its own is refused"


def tables() -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield class, reason, and the flags by destination."""
    for reason, names in HONOURED.items():
        yield "honoured", reason, frozenset(names.split())
    yield "honoured", _FROM_CONFIG, ARCHITECTURE
    for dest, why in {**REFUSED, **REFUSED_OTHERWISE, **REFUSED_BY_MEGATRON}.items():
        yield "refused", str(why), frozenset({dest})
    for reason, names in WITHOUT_EFFECT.items():
        yield "without effect", reason, frozenset(names.split())


def check_no_megatron_rl_flag(given: Mapping[str, Any], parser: argparse.ArgumentParser) -> None:
    """Refuse flags of Megatron's own RL loop, which look like ours and have no effect here."""
    # All of the group: another version of Megatron may have more of them.
    for flag, action in options_of(parser, "rl").items():
        if action.dest in given and action.dest not in SHARED_RL:
            found, remedy = OWN_RL_REASON
            raise UsageError(found, flag=flag, remedy=remedy)


def check_refused(values: Mapping[str, Any]) -> None:
    """Refuse flags, and values of flags, that RL cannot honour; `values` by destination."""
    for dest, (why, remedy) in REFUSED.items():
        if values.get(dest) and dest not in OWN_RL - {"perform_rl_step"}:
            raise UsageError(why, flag=as_flag(dest), remedy=remedy)
    for dest, (refused, (why, remedy)) in REFUSED_VALUES.items():
        given = values.get(dest)
        for value in given if isinstance(given, list) else [given]:
            if (name := getattr(value, "name", value)) in refused:
                raise UsageError(why, flag=as_flag(dest, name), remedy=remedy)


def check_numbers(values: Mapping[str, Any]) -> None:
    """Check single numbers that Megatron does not check."""
    for words, names in RANGES.items():
        for dest in names.split():
            given = values.get(dest)
            for value in given if isinstance(given, list) else [given]:
                if value is not None and not _BOUNDS[words].hold(value):
                    raise UsageError(f"must be {words}", flag=as_flag(dest, value), remedy=CORRECT)


def check_order(values: Mapping[str, Any]) -> None:
    """Check pairs of numbers that Megatron does not check."""
    for lower, upper in _ORDERED:
        low, high = values.get(lower), values.get(upper)
        if low is not None and high is not None and low > high:
            raise UsageError(
                f"is greater than {as_flag(upper)} {high}",
                flag=as_flag(lower, low),
                remedy="lower the first or raise the second",
            )
    _check_schedule(values)


def _check_schedule(values: Mapping[str, Any]) -> None:
    """Check what Megatron's scheduler asserts when models are built."""
    warmup, updates = values.get("lr_warmup_iters"), values.get("train_iters")
    decay = values.get("lr_decay_iters") or updates
    if warmup and decay and warmup >= decay:
        where = "--lr-decay-iters" if values.get("lr_decay_iters") else "the run's updates,"
        raise UsageError(
            f"is not less than {where} {decay}",
            flag=f"--lr-warmup-iters {warmup}",
            remedy=f"lower it{'' if values.get('lr_decay_iters') else ', or raise --rl-num-steps'}",
        )
    if values.get("lr_decay_style") == "WSD" and values.get("lr_wsd_decay_iters") is None:
        raise UsageError("needs --lr-wsd-decay-iters", flag="--lr-decay-style WSD", remedy="add it")


def check_critic_rate(rate: float | None, values: Mapping[str, Any]) -> None:
    """Check that the critic's rate fits the schedule's start and end, which are the actor's."""
    for dest in ("min_lr", "lr_warmup_init"):
        if rate is not None and (bound := values.get(dest)) is not None and rate < bound:
            raise UsageError(
                f"is less than {as_flag(dest)} {bound}",
                flag=f"--rl-critic-lr {rate}",
                remedy="lower the latter",
            )


def check_derived_count(given: Mapping[str, Any], derived: Mapping[str, Any]) -> None:
    """Refuse flags that differ from the values which follow from ours."""
    for dest, (why, remedy) in REFUSED_OTHERWISE.items():
        if given.get(dest, derived[dest]) != derived[dest]:
            raise UsageError(why, flag=as_flag(dest, given[dest]), remedy=remedy)


def given_to_fork(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the Megatron flags that differ from their defaults in `args`, which a fork has parsed.

    Flags that Megatron's validation sets by itself are left out.
    """
    return {
        action.dest: getattr(args, action.dest)
        for action in _actions(parser)
        if action.dest not in SET_BY_VALIDATION
        and hasattr(args, action.dest)
        and getattr(args, action.dest) != parser.get_default(action.dest)
    }


def notes(
    given: Mapping[str, Any],
    parser: argparse.ArgumentParser,
    *,
    unread: Collection[str] = frozenset(),
) -> tuple[str, ...]:
    """Return a line each on given flags: without effect in RL, `unread` by this model, unknown.

    `parser` is the installed Megatron's, with or without our flags.
    """
    flags = {action.dest: action.option_strings[0] for action in _actions(parser)}
    known: set[str] = set()
    without_effect = []
    for kind, reason, dests in tables():
        known |= dests
        if kind == "without effect" and (named := [d for d in given if d in dests & flags.keys()]):
            without_effect.append(f"{', '.join(flags[dest] for dest in named)} ({reason})")
    lines = [f"without effect in RL: {'; '.join(without_effect)}"] if without_effect else []
    if named := [flags[dest] for dest in given if dest in unread]:
        lines.append(f"without effect on this model: {', '.join(named)}")
    if unknown := [flags[dest] for dest in given if dest in flags and dest not in known]:
        lines.append(f"not known to mcore_rl, left to Megatron: {', '.join(unknown)}")
    return tuple(lines)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield Megatron's own actions, one per destination."""
    seen: set[str] = set()
    for group in parser._action_groups:
        for action in group._group_actions if group.title != GROUP else ():
            if action.option_strings and action.dest not in seen | {"help"}:
                seen.add(action.dest)
                yield action


def document(parser: argparse.ArgumentParser, version: str) -> str:
    """Return docs/using/megatron_flags.md."""
    flags = {action.dest: action.option_strings[0] for action in _actions(parser)}
    rows: dict[str, dict[str, list[str]]] = {}
    for kind, reason, dests in tables():
        rows.setdefault(kind, {}).setdefault(reason, []).extend(flags[d] for d in dests)
    rows["refused"] |= {
        f"{' and '.join(values)}: {reason}": [flags[dest]]
        for dest, (values, reason) in REFUSED_VALUES.items()
    }
    counts = {
        kind.replace(" ", "_"): sum(map(len, groups.values())) for kind, groups in rows.items()
    }
    counts["refused"] -= len(REFUSED_VALUES)
    text = _HEAD.format(version=version, total=len(flags), **counts)
    for title, kind, column in _SECTIONS:
        text += f"\n## {title}\n\n| {column} | flags |\n| --- | --- |\n"
        for reason, names in rows[kind].items():
            text += f"| {reason} | {' '.join(f'`{name}`' for name in sorted(names))} |\n"
    return text


_HEAD = """# Megatron's flags in RL

Generated by `python scripts/document_flags.py` from
`mcore_rl/flags/megatron_flags.py`; a test holds that it is up to date and complete.

Of the {total} flags of Megatron {version}, {honoured} are honoured, {refused} are refused with a
reason, and {without_effect} have no effect in RL: a run names the given ones in one line when it
starts, and so does `mcore-rl doctor`. A flag of another version of Megatron that is in no table is
passed to Megatron and reported as unknown.

In a fork, which parses its arguments itself, a value that differs from the parser's default counts
as given. There `--train-iters` is not refused: it is the length of Megatron's learning rate
schedule.

Flags that depend on the machine are derived from what can be imported there. Without CUDA or
without Transformer Engine, layers are Megatron's local ones, without fusions. Without Apex's
`fused_weight_gradient_mlp_cuda` gradient accumulation is not fused, because the output layer cannot
use Transformer Engine's kernel. For latent attention without YaRN rotation is not fused. With
Transformer Engine `--moe-grouped-gemm` is derived, unless `--rl-no-moe-grouped-gemm` is given. A
given flag that needs a missing package is refused. The planner assumes a machine with Transformer
Engine and without Apex.
"""
_SECTIONS: Sequence[tuple[str, str, str]] = (
    ("Refused", "refused", "why, and what to do"),
    ("Without effect", "without effect", "because"),
    ("Honoured", "honoured", "where"),
)
