"""The numbers of the page: headlines, metrics, configuration, versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mcore_rl.common.parameters import flag_of
from mcore_rl.config import RLConfig, frozen, run_flags
from mcore_rl.flags.megatron_flags import OWN_RL
from mcore_rl.observe.run_directory import HIGHEST_IS_BEST, LOWEST_IS_BEST, MAIN_METRICS
from mcore_rl.observe.timeline import IDLE
from mcore_rl.tools.report.run_files import Run
from mcore_rl.tools.report.texts import clean, shown

_MAIN = (*MAIN_METRICS, "kl/ref")
_NOTHING = object()
GOOD, BAD = "good", "bad"
_LAST_STEPS = 10
MAX_ROWS = 2_000  # a browser lays out more of them for seconds
_NOT_FACTS = ("metrics", "versions", "num_steps")  # of a summary


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: a name and its cells, "–" where a run has no value.

    Example: `Row("--rl-kl-coef", ("0.01", "0.05"), "differs")`
    """

    name: str
    cells: tuple[str, ...]  # one per run; of a metric first, last and best
    mark: str = ""  # "differs" between runs, "given" (not the default), "main", or ""


def metric_rows(runs: Sequence[Run]) -> list[Row]:
    """Return the metrics for which a run has values, the main ones first, at most `MAX_ROWS`
    others."""
    names = metric_names(runs)
    main = [name for name in _MAIN if name in names]
    others = sorted(names.difference(main))[:MAX_ROWS]
    return [
        Row(name, tuple(c for run in runs for c in _first_last_best(name, run)), mark)
        for names_of_mark, mark in ((main, "main"), (others, ""))
        for name in names_of_mark
    ]


def metric_names(runs: Sequence[Run]) -> set[str]:
    """Return the metrics for which a run has values."""
    return {name for run in runs for name in run.points}


def _first_last_best(name: str, run: Run) -> tuple[str, str, str]:
    steps, values = run.series(name)
    if not values.size:
        return "–", "–", "–"
    best = "–"
    if name in HIGHEST_IS_BEST or name in LOWEST_IS_BEST:
        place = int(values.argmax() if name in HIGHEST_IS_BEST else values.argmin())
        best = f"{shown(name, values[place])} @ {steps[place]}"
    return shown(name, values[0]), shown(name, values[-1]), best


def settings_of(runs: Sequence[Run]) -> dict[str, tuple[list[Row], list[Row]]]:
    """Return the configuration: title -> rows above and below the fold.

    Values that differ between two runs, or from the defaults, are above.
    """
    configs = [dict(run.config) for run in runs]
    if not any(configs):
        return {}
    defaults = {name: parameter.default for name, parameter in run_flags().items()}
    defaults["reward"] = RLConfig().reward  # the default depends on other flags
    # The flags of an algorithm's parts, also a user's, whose declarations need torch.
    named = {name[3:] for config in configs for name in config if name.startswith("rl_")}
    parts = named - defaults.keys() - {name.removeprefix("rl_") for name in OWN_RL} - {"config"}
    ours = []
    for name in (*defaults, *sorted(parts)):
        values = [_taken(config, name) for config in configs]
        if any(value is not _NOTHING for value in values):
            ours.append(_row(flag_of(name), values, defaults.get(name)))
    names = sorted({name for config in configs for name in config})
    theirs = [_row(name, [config.get(name, _NOTHING) for config in configs]) for name in names]
    if len(runs) == 1:
        return {"--rl-* flags": _split(ours, "given"), "Megatron's arguments": ([], theirs)}
    differing, alike = _split([*ours, *theirs], "differs")
    return {"What differs": (differing, []), "What is alike": _split(alike, "given")}


def _taken(config: dict[str, Any], field: str) -> Any:
    """Return the value of an --rl-* flag, which config.yaml has under two names; remove both."""
    older, value = config.pop(field, _NOTHING), config.pop(f"rl_{field}", _NOTHING)
    return value if older is _NOTHING else older


def _split(rows: Sequence[Row], mark: str) -> tuple[list[Row], list[Row]]:
    return [r for r in rows if r.mark == mark], [r for r in rows if r.mark != mark]


def _row(name: str, values: Sequence[Any], default: Any = _NOTHING) -> Row:
    cells = tuple("–" if value is _NOTHING else clean(value) for value in values)
    is_given = default is not _NOTHING and frozen(values[0]) != default
    return Row(clean(name), cells, "differs" if len(set(cells)) > 1 else "given" * is_given)


def subjects_of(runs: Sequence[Run]) -> list[Row]:
    """Return the model, data, algorithm, reward and command: the introduction of the page."""
    rows = [_row(name, [of_run(run) for run in runs]) for name, of_run in _SUBJECTS.items()]
    return [row for row in rows if set(row.cells) != {"–"}]


def _flag(run: Run, field: str) -> Any:
    value = run.config.get(f"rl_{field}", run.config.get(field))
    return "–" if value is None else value


def _model(run: Run) -> str:
    sizes = {"num_layers": "layers", "hidden_size": "hidden", "num_experts": "experts"}
    shown_sizes = [
        f"{run.config[n]} {s}" for n, s in sizes.items() if isinstance(run.config.get(n), int)
    ]
    folder = clean(_flag(run, "hf_checkpoint"))
    return f"{folder} ({', '.join(shown_sizes)})" if shown_sizes else folder


def _data(run: Run) -> str:
    train, held_out = clean(_flag(run, "prompts")), clean(_flag(run, "eval_prompts"))
    return train if held_out == "–" else f"{train}, held out: {held_out}"


_SUBJECTS: Mapping[str, Callable[[Run], Any]] = {
    "model": _model,
    "data": _data,
    "algorithm": lambda run: _flag(run, "algorithm"),
    "reward": lambda run: _flag(run, "reward"),
    "command": lambda run: run.about.get("command", "–"),
    "ranks": lambda run: run.about.get("ranks", "–"),
}


def facts_of(runs: Sequence[Run]) -> list[Row]:
    """Return folders, layouts and versions, from the summaries, and idle times."""
    rows = [
        Row("folder", tuple(clean(str(run.folder)) for run in runs)),
        Row("last written", tuple(f"{run.last_written:%Y-%m-%d %H:%M:%S}" for run in runs)),
    ]
    facts = [{k: v for k, v in run.summary.items() if k not in _NOT_FACTS} for run in runs]
    versions = [_versions(run) for run in runs]
    idle = [_idle_shares(run) for run in runs]
    for table, separator in ((facts, " "), (idle, " "), (versions, "_")):
        for name in dict.fromkeys(name for column in table for name in column):
            values = [column.get(name) for column in table]
            values = [_NOTHING if value is None else value for value in values]
            rows.append(_row(name.replace("_", separator), values))
    return rows


def _versions(run: Run) -> dict[str, Any]:
    both = (run.about.get("versions"), run.summary.get("versions"))
    return {
        name: v for versions in both if isinstance(versions, dict) for name, v in versions.items()
    }


def _idle_shares(run: Run) -> dict[str, str]:
    """Return the share of each role's spans in which it only waited, if it says so."""
    seconds: dict[str, list[float]] = {}  # role -> in all, idle
    for line in run.timeline:
        sums = seconds.setdefault(line.role, [0.0, 0.0])
        for what, start, end in line.spans:
            sums[0] += end - start
            sums[1] += (end - start) * (what == IDLE)
    return {
        f"idle share of {role}": shown("_share", idle / total)
        for role, (total, idle) in seconds.items()
        if idle
    }


class Headline(NamedTuple):
    """A value, the text beneath it, and whether it is good or bad news ("" neither).

    Example: `Headline("41.1 GB", "1.00 x the lower bound; 60 of 60 attested", "good")`
    """

    value: str
    beneath: str = ""
    mood: str = ""


def headlines(runs: Sequence[Run]) -> dict[str, list[Headline]]:
    """Return title -> a headline per run, without headlines for which no run has a value."""
    by_title = {}
    for title, (metrics, of_run) in _HEADLINES.items():
        of_runs = []
        for run in runs:
            values = [run.series(metric)[1] for metric in metrics]
            of_runs.append(of_run(run, *values) if all(v.size for v in values) else None)
        if any(of_runs):
            by_title[title] = [headline or Headline("–") for headline in of_runs]
    return by_title


_OF_STEPS = ("reward/mean", "loss/sft", "loss/dpo")  # a step has one of them at least


def _steps(run: Run) -> Headline:
    # The evaluation after the last step has none of them.
    done = max((run.series(name)[0] for name in _OF_STEPS), key=len)
    requested = _flag(run, "num_steps")
    requested = requested if isinstance(requested, int) else 0
    value = f"{done.size:,} of {requested:,}" if requested else f"{done.size:,}"
    # A summary does not show it: it may be from a shorter run in the folder.
    if requested and done.size and done[-1] >= requested - 1:
        return Headline(value, "finished", GOOD)
    for event in reversed(run.events):
        if event.kind == "resume":  # earlier ends were resumed
            break
        if event.kind == "end":
            return Headline(value, "ended early, see the events", BAD)
        if "stopped after step" in event.text:
            return Headline(value, "stopped by an alarm", BAD)
    return Headline(value, "still running, or ended before its last step")


def _course(metric: str, *, falls: bool = False) -> Callable[[Run, np.ndarray], Headline]:
    def headline(run: Run, values: np.ndarray) -> Headline:
        best = int(values.argmin() if falls else values.argmax())
        beneath = f"best {shown(metric, values[best])} at step {run.series(metric)[0][best]}"
        if values.size > _LAST_STEPS:
            mean = shown(metric, values[-_LAST_STEPS:].mean())
            beneath += f"; mean of the last {_LAST_STEPS} {mean}"
        return Headline(f"{shown(metric, values[0])} → {shown(metric, values[-1])}", beneath)

    return headline


def _alarms(run: Run) -> Headline | None:
    lasting = run.series("health/alarms")[1]
    raised = [event.alarm for event in run.events if event.alarm]
    if not raised and not lasting.any():
        return Headline("none", "all thresholds held", GOOD) if lasting.size else None
    last = int(lasting[-1]) if lasting.size else 0
    names = f"; {', '.join(dict.fromkeys(raised))}" if raised else ""
    return Headline(f"{len(raised) or int(lasting.max())}", f"{last} lasting{names}", BAD)


def _kl(run: Run, values: np.ndarray) -> Headline:
    if not values.any():
        return Headline("0", "no KL is computed, or the policy has not changed")
    return Headline(shown("", values[-1]), f"highest {shown('', values.max())}")


def _mismatch(run: Run, values: np.ndarray) -> Headline:
    beneath = f"KL, median; highest {shown('', values.max())}"
    return Headline(shown("", float(np.median(values))), beneath)


def _step_time(run: Run, seconds: np.ndarray) -> Headline | None:
    if not seconds.any():
        return None
    shares = sorted(
        (run.series(name)[1].sum() / seconds.sum(), name[len("time/") :].removesuffix("_seconds"))
        for name in run.points
        if name.startswith("time/") and name != "time/step_seconds"
    )
    longest = [f"{stage.replace('_', ' ')} {share:.0%}" for share, stage in shares[:-4:-1]]
    return Headline(shown("_seconds", float(np.median(seconds))), ", ".join(longest))


def _throughput(run: Run, rollout: np.ndarray, train: np.ndarray) -> Headline:
    beneath = f"rollout, median; training {np.median(train):,.0f}"
    return Headline(f"{np.median(rollout):,.0f} tok/s", beneath)


def _handover(run: Run, received: np.ndarray) -> Headline:
    bound = run.series("reshard/lower_bound_bytes_max")[1].sum()
    attested = run.series("reshard/attested")[1] > 0
    beneath = f"{attested.sum():,} of {attested.size:,} attested"
    if bound:
        beneath = f"{received.sum() / bound:.2f} x the lower bound; {beneath}"
    mood = GOOD if attested.size and attested.all() else ""
    return Headline(shown("bytes", float(np.median(received))), beneath, mood)


def _memory(run: Run, host: np.ndarray) -> Headline:
    device, most = run.series("memory/device_peak_bytes")[1], shown("bytes", host.max())
    if device.any():
        return Headline(shown("bytes", device.max()), f"device, peak; host {most}")
    return Headline(most, "host, peak of the largest rank")


# Title -> the metrics that a headline needs, and the function of the run and their values.
_HEADLINES: Mapping[str, tuple[tuple[str, ...], Callable[..., Headline | None]]] = {
    "Steps": ((), _steps),
    "Reward": (("reward/mean",), _course("reward/mean")),
    "Held-out accuracy": (("eval/accuracy",), _course("eval/accuracy")),
    "Loss of demonstrations": (("loss/sft",), _course("loss/sft", falls=True)),
    "Loss of pairs": (("loss/dpo",), _course("loss/dpo", falls=True)),
    "Held-out loss": (("eval/loss",), _course("eval/loss", falls=True)),
    "Alarms": ((), _alarms),
    "KL to the reference": (("kl/ref",), _kl),
    "Engine against actor": (("kl/rollout_actor",), _mismatch),
    "A step, median": (("time/step_seconds",), _step_time),
    "Throughput": (
        ("throughput/rollout_tokens_per_second", "throughput/train_tokens_per_second"),
        _throughput,
    ),
    "Hand-over a step": (("reshard/received_bytes_max",), _handover),
    "Memory": (("memory/host_peak_bytes",), _memory),
}
