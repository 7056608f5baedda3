"""The page's tables: metrics by first, last and best, configuration, versions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.common.parameters import flag_of, parameters_of
from mcore_rl.flags.megatron_flags import OWN_RL
from mcore_rl.flags.options import RLConfig, frozen
from mcore_rl.observe.run_directory import HIGHEST_IS_BEST, LOWEST_IS_BEST
from mcore_rl.tools.report.run_files import Run
from mcore_rl.tools.report.texts import clean, shown

_FIRST = ("reward/mean", "eval/accuracy", "kl/ref", "entropy", "kl/rollout_actor", "grad_norm")
_NOTHING = object()


@dataclass(frozen=True, slots=True)
class MetricRow:
    """`cells` are first, last, best of each run in turn."""

    metric: str
    cells: tuple[str, ...]
    is_main: bool


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A value for each run; `mark` says why the row stands where it does."""

    name: str
    cells: tuple[str, ...]
    mark: str = ""  # "differs", "given" (not the default), or ""


@dataclass(frozen=True, slots=True)
class Settings:
    """Rows of a table, and how many of them stand above the fold."""

    title: str
    rows: tuple[SettingRow, ...]
    num_first: int


def metric_rows(runs: Sequence[Run]) -> list[MetricRow]:
    """All metrics that a run has values of, the main ones first."""
    names = {name for run in runs for name in run.values if run.series(name)[1].size}
    ordered = [name for name in _FIRST if name in names]
    rows = []
    for name in (*ordered, *sorted(names - set(ordered))):
        cells: list[str] = []
        for run in runs:
            steps, values = run.series(name)
            if not values.size:
                cells += ["–"] * 3
                continue
            best = "–"
            if name in HIGHEST_IS_BEST or name in LOWEST_IS_BEST:
                place = int(values.argmax() if name in HIGHEST_IS_BEST else values.argmin())
                best = f"{shown(name, values[place])} @ {steps[place]}"
            cells += [shown(name, values[0]), shown(name, values[-1]), best]
        rows.append(MetricRow(name, tuple(cells), name in ordered))
    return rows


def settings_of(runs: Sequence[Run]) -> list[Settings]:
    """The configuration: what differs between two runs, or from the defaults, comes first."""
    configs = [dict(run.config) for run in runs]
    if not any(configs):
        return []
    ours: list[SettingRow] = []
    defaults = {parameter.name: parameter.default for parameter in parameters_of(RLConfig)}
    defaults["reward"] = RLConfig().rewards  # which other flags decide where it is not given
    # Those of an algorithm's parts, a user's own too: to ask for their declarations needs torch.
    named = {name[3:] for config in configs for name in config if name.startswith("rl_")}
    parts = named - defaults.keys() - {name.removeprefix("rl_") for name in OWN_RL} - {"config"}
    for name in (*defaults, *sorted(parts)):
        values = [_taken(config, name) for config in configs]
        if any(value is not _NOTHING for value in values):
            ours.append(_row(flag_of(name), values, defaults.get(name), of_rl=True))
    names = sorted({name for config in configs for name in config})
    theirs = [
        _row(name, [config.get(name, _NOTHING) for config in configs], None, of_rl=False)
        for name in names
    ]
    rows = [*ours, *theirs]
    if len(runs) == 1:
        return [_sorted("--rl-* flags", ours, "given"), _sorted("Megatron's arguments", theirs, "")]
    differing = [row for row in rows if row.mark == "differs"]
    alike = [row for row in rows if row.mark != "differs"]
    return [
        Settings("What differs", tuple(differing), len(differing)),
        _sorted("What is alike", alike, "given"),
    ]


def _taken(config: dict[str, Any], field: str) -> Any:
    """The value of a flag of ours, which config.yaml has under two names; both are gone then."""
    values = [config.pop(name, _NOTHING) for name in (field, f"rl_{field}")]
    return values[0] if values[0] is not _NOTHING else values[1]


def _row(name: str, values: Sequence[Any], default: Any, *, of_rl: bool) -> SettingRow:
    cells = tuple("–" if value is _NOTHING else clean(value) for value in values)
    mark = ""
    if len(set(cells)) > 1:
        mark = "differs"
    elif of_rl and frozen(values[0]) != default:
        mark = "given"
    return SettingRow(name, cells, mark)


def _sorted(title: str, rows: Sequence[SettingRow], first: str) -> Settings:
    above = [row for row in rows if first and row.mark == first]
    below = [row for row in rows if not (first and row.mark == first)]
    return Settings(title, (*above, *below), len(above))


def subjects_of(runs: Sequence[Run]) -> list[SettingRow]:
    """What was trained, on what, and by which command: where a reader begins."""
    rows = []
    for name, of_run in (
        ("model", _model),
        ("data", _data),
        ("algorithm", lambda run: _ours(run, "algorithm")),
        ("reward", lambda run: _ours(run, "reward")),
        ("command", lambda run: clean(run.about.get("command", "–"))),
        ("ranks", lambda run: clean(run.about.get("ranks", "–"))),
    ):
        cells = tuple(of_run(run) for run in runs)
        if any(cell != "–" for cell in cells):
            rows.append(SettingRow(name, cells, "differs" if len(set(cells)) > 1 else ""))
    return rows


def _ours(run: Run, field: str) -> str:
    value = run.config.get(f"rl_{field}", run.config.get(field))
    return "–" if value is None else clean(value)


def _model(run: Run) -> str:
    sizes = [
        f"{run.config[name]} {what}"
        for name, what in (
            ("num_layers", "layers"),
            ("hidden_size", "hidden"),
            ("num_experts", "experts"),
        )
        if isinstance(run.config.get(name), int)
    ]
    folder = _ours(run, "hf_checkpoint")
    return f"{folder} ({', '.join(sizes)})" if sizes else folder


def _data(run: Run) -> str:
    train, held_out = _ours(run, "prompts"), _ours(run, "eval_prompts")
    return train if held_out == "–" else f"{train}, held out: {held_out}"


def facts_of(runs: Sequence[Run]) -> list[SettingRow]:
    """Folders, layouts and versions, as the summaries have them."""
    rows = [
        SettingRow("folder", tuple(clean(str(run.folder)) for run in runs)),
        SettingRow("last written", tuple(_when(run) for run in runs)),
    ]
    keys = [
        key
        for key in dict.fromkeys(key for run in runs for key in run.summary)
        if key not in ("metrics", "versions", "num_steps")
    ]
    for key in keys:
        rows.append(_fact(key.replace("_", " "), [run.summary.get(key) for run in runs]))
    versions = [
        {**_mapping(run.about.get("versions")), **_mapping(run.summary.get("versions"))}
        for run in runs
    ]
    for package in dict.fromkeys(name for found in versions for name in found):
        rows.append(_fact(package, [found.get(package) for found in versions]))
    return rows


def _fact(name: str, values: Sequence[Any]) -> SettingRow:
    cells = tuple("–" if value is None else clean(value) for value in values)
    return SettingRow(clean(name), cells, "differs" if len(set(cells)) > 1 else "")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _when(run: Run) -> str:
    return run.last_written.strftime("%Y-%m-%d %H:%M:%S") if run.last_written else "–"
