"""The headline figures of a run: what a busy reader looks at first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mcore_rl.tools.report.run_files import Run
from mcore_rl.tools.report.texts import shown, shown_number, shown_seconds

GOOD, BAD = "good", "bad"
_LAST_STEPS = 10


@dataclass(frozen=True, slots=True)
class Figure:
    """A value, what is said beneath it, and whether it is cause for joy or worry ("" neither)."""

    value: str
    beneath: str = ""
    mood: str = ""


@dataclass(frozen=True, slots=True)
class Headline:
    """One figure for each run."""

    title: str
    figures: tuple[Figure, ...]


def headlines(runs: Sequence[Run]) -> list[Headline]:
    """Those that at least one run has something to say to."""
    found = []
    for title, of_run in _HEADLINES:
        figures = [of_run(run) for run in runs]
        if any(figure is not None for figure in figures):
            found.append(Headline(title, tuple(figure or Figure("–") for figure in figures)))
    return found


def _steps(run: Run) -> Figure:
    asked = run.num_steps_asked
    value = f"{run.num_steps_done:,} of {asked:,}" if asked else f"{run.num_steps_done:,}"
    if run.is_finished:
        return Figure(value, "finished", GOOD)
    for event in reversed(run.events):
        if event.kind == "resume":  # what ended it before is over
            break
        if event.kind == "end":
            return Figure(value, "ended early, see the events", BAD)
        if "stopped after step" in event.text:
            return Figure(value, "stopped by an alarm", BAD)
    return Figure(value, "still going on, or ended before its last step")


def _climbs(metric: str) -> Callable[[Run], Figure | None]:
    def figure(run: Run) -> Figure | None:
        steps, values = run.series(metric)
        if not values.size:
            return None
        best = int(values.argmax())
        beneath = f"best {shown(metric, values[best])} at step {steps[best]}"
        if values.size > _LAST_STEPS:
            mean = float(values[-_LAST_STEPS:].mean())
            beneath += f"; mean of the last {_LAST_STEPS} {shown(metric, mean)}"
        return Figure(f"{shown(metric, values[0])} → {shown(metric, values[-1])}", beneath)

    return figure


def _kl(run: Run) -> Figure | None:
    values = run.series("kl/ref")[1]
    if not values.size:
        return None
    if not values.any():
        return Figure("0", "no KL is taken, or the policy has not moved")
    return Figure(shown_number(values[-1]), f"highest {shown_number(values.max())}")


def _mismatch(run: Run) -> Figure | None:
    values = run.series("kl/rollout_actor")[1]
    if not values.size:
        return None
    return Figure(
        shown_number(float(np.median(values))), f"KL, median; highest {shown_number(values.max())}"
    )


def _step_time(run: Run) -> Figure | None:
    total = run.series("time/step_seconds")[1].sum()
    if not total:
        return None
    seconds = {
        name.removeprefix("time/").removesuffix("_seconds"): run.series(name)[1].sum()
        for name in run.values
        if name.startswith("time/") and name != "time/step_seconds"
    }
    shares = sorted(((part / total, stage) for stage, part in seconds.items()), reverse=True)
    most = ", ".join(f"{stage.replace('_', ' ')} {share:.0%}" for share, stage in shares[:3])
    return Figure(shown_seconds(float(np.median(run.series("time/step_seconds")[1]))), most)


def _throughput(run: Run) -> Figure | None:
    rollout, train = (
        run.series(f"throughput/{stage}_tokens_per_second")[1] for stage in ("rollout", "train")
    )
    if not rollout.size or not train.size:
        return None
    return Figure(
        f"{np.median(rollout):,.0f} tok/s", f"rollout, median; training {np.median(train):,.0f}"
    )


def _handover(run: Run) -> Figure | None:
    received = run.series("reshard/received_bytes_max")[1]
    bound = run.series("reshard/lower_bound_bytes_max")[1]
    if not received.size:
        return None
    attested = run.series("reshard/attested")[1]
    beneath = f"{int((attested > 0).sum()):,} of {attested.size:,} attested"
    if bound.sum():
        beneath = f"{received.sum() / bound.sum():.2f} x the lower bound; {beneath}"
    return Figure(
        shown("bytes", float(np.median(received))),
        beneath,
        GOOD if attested.size and (attested > 0).all() else "",
    )


def _memory(run: Run) -> Figure | None:
    host = run.series("memory/host_peak_bytes")[1]
    device = run.series("memory/device_peak_bytes")[1]
    if not host.size:
        return None
    if device.any():
        return Figure(
            shown("bytes", device.max()), f"device, peak; host {shown('bytes', host.max())}"
        )
    return Figure(shown("bytes", host.max()), "host, peak of the largest rank")


def _alarms(run: Run) -> Figure | None:
    lasting = run.series("health/alarms")[1]
    raised = [event for event in run.events if event.alarm]
    if not lasting.size and not raised:
        return None
    last = int(lasting[-1]) if lasting.size else 0
    if not raised and not lasting.any():
        return Figure("none", "all thresholds held", GOOD)
    names = ", ".join(dict.fromkeys(event.alarm or "" for event in raised))
    num_raised = len(raised) or int(lasting.max())
    return Figure(f"{num_raised}", f"{last} lasting{f'; {names}' if names else ''}", BAD)


_HEADLINES: tuple[tuple[str, Callable[[Run], Figure | None]], ...] = (
    ("Steps", _steps),
    ("Reward", _climbs("reward/mean")),
    ("Held-out accuracy", _climbs("eval/accuracy")),
    ("Alarms", _alarms),
    ("KL to the reference", _kl),
    ("Engine against actor", _mismatch),
    ("A step, median", _step_time),
    ("Throughput", _throughput),
    ("Hand-over a step", _handover),
    ("Memory", _memory),
)
