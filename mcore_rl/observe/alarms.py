"""Alarms: rules that detect in a run's metrics that it is about to collapse. Pure.

Each rule checks one metric over the last `window` steps against one threshold, a flag. They cover
the usual failures: equal rewards, which give no gradient; vanishing entropy; responses that grow to
the limit or shrink to nothing; an exploding KL or gradient norm; an engine and an actor that
disagree; growing memory; experts that get all tokens, or none.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.observe.options import AlarmOptions

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Rule:
    """The condition of one alarm: `holds(threshold, recent, first)` is false if it is raised.

    `recent` are the metric's last `window` values, the newest last; `first` is the mean of the
    run's first `window` values.
    """

    field: str  # of AlarmOptions: alarm_<...>
    metric: str
    holds: Callable[[float, Sequence[float], float], bool]
    says: str  # with {value}, {limit} and {first}
    value: Callable[[Sequence[float]], float] = statistics.fmean
    remedy: str = ""

    @property
    def name(self) -> str:
        """The name in its flag, `--rl-alarm-<name>`."""
        return self.field.removeprefix("alarm_").replace("_", "-")


def _mean_at_most(limit: float, recent: Sequence[float], first: float) -> bool:
    return statistics.fmean(recent) <= limit


def _share_of_first_at_least(limit: float, recent: Sequence[float], first: float) -> bool:
    return statistics.fmean(recent) >= limit * first


def _last_at_most_times_the_median(limit: float, recent: Sequence[float], first: float) -> bool:
    """Compare the last value, without zeros: a step whose rewards are all equal has no gradient."""
    positive = [value for value in recent if value > 0]
    few = len(positive) <= len(recent) // 2
    return few or recent[-1] <= limit * statistics.median(positive)


def _slope(values: Sequence[float]) -> float:
    """Return the least-squares slope, per step."""
    return statistics.linear_regression(range(len(values)), values).slope


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _grows(field: str, metric: str, where: str) -> Rule:
    return Rule(
        field,
        metric,
        lambda limit, recent, _: _slope(recent) <= limit * _MIB,
        f"{where} memory grows by {{value}} MiB a step",
        value=lambda recent: _slope(recent) / _MIB,
        remedy="find what holds it with a memory profile; the run ends when none is left",
    )


RULES = (
    Rule(
        "alarm_reward_std",
        "reward/std",
        lambda limit, recent, _: statistics.fmean(recent) >= limit,
        "the rewards' standard deviation is {value}, below {limit}",
        remedy="equal rewards give no gradient: look at rollouts.jsonl, the reward and the "
        "prompts' difficulty",
    ),
    Rule(
        "alarm_kl",
        "kl/ref",
        _mean_at_most,
        "the KL to the reference is {value}, above {limit}",
        remedy="lower --lr, or raise --rl-kl-coef",
    ),
    Rule(
        "alarm_entropy",
        "entropy",
        _share_of_first_at_least,
        "the entropy is {value}, less than {limit} of its first value ({first})",
        remedy="lower --lr, raise --rl-entropy-coef or --rl-clip-eps-upper",
    ),
    Rule(
        "alarm_response_tokens",
        "response_tokens/mean",
        lambda limit, recent, first: first / limit <= statistics.fmean(recent) <= first * limit,
        "the mean response has {value} tokens, at first it had {first}: a change by a factor of "
        "more than {limit}",
        remedy="look at rollouts.jsonl for what the reward pays for",
    ),
    Rule(
        "alarm_clip_fraction",
        "clip_fraction",
        _mean_at_most,
        "{value} of the tokens are clipped, more than {limit}",
        remedy="lower --lr or --rl-num-mini-batches",
    ),
    Rule(
        "alarm_mismatch",
        "kl/rollout_actor",
        _mean_at_most,
        "the KL between engine and actor with the same weights is {value}, above {limit}",
        remedy="see --rl-mismatch-correction, --rl-attest full and --rl-canary-interval",
    ),
    Rule(
        "alarm_grad_norm",
        "grad_norm",
        _last_at_most_times_the_median,
        "the gradient norm is {value}, more than {limit} times the median of the last steps",
        value=_last,
        remedy="lower --clip-grad; look at the step's samples in rollouts.jsonl",
    ),
    _grows("alarm_host_growth_mib", "memory/host_bytes", "a rank's host"),
    _grows("alarm_device_growth_mib", "memory/device_bytes", "a rank's device"),
    Rule(
        "alarm_expert_imbalance",
        "moe/imbalance",
        _mean_at_most,
        "in some layer one expert gets {value} times as many tokens as the mean, more than {limit}",
        remedy="see --moe-router-load-balancing-type and --moe-router-bias-update-rate",
    ),
    Rule(
        "alarm_unused_experts",
        "moe/most_unused_experts",
        _mean_at_most,
        "in some layer {value} of the experts get no token, more than {limit}",
        remedy="see moe/unused_experts/layer_*; lower --lr, or see --moe-router-bias-update-rate",
    ),
    Rule(
        "alarm_tokens_per_second",
        "throughput/rollout_tokens_per_second",
        _share_of_first_at_least,
        "rollout generates {value} tokens per second, less than {limit} of what it did ({first})",
        remedy="look for another process on a device, or a slow rank with --rl-trace 1",
    ),
)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule that was violated at `step`."""

    rule: Rule
    step: int
    text: str


class Health:
    """Checks every step's metrics and returns new alarms.

    A threshold of 0 disables its rule. A rule is checked once it has values of `alarm_window`
    steps. While it is violated it raises no second alarm. Values that are not finite are skipped;
    other checks stop the run.
    """

    def __init__(self, options: AlarmOptions) -> None:
        self._thresholds = dataclasses.asdict(options)
        self._rules = [rule for rule in RULES if self._thresholds[rule.field]]
        self._window = options.alarm_window
        self._recent: dict[str, deque[float]] = {}
        self._first: dict[str, float] = {}
        self.active: dict[str, Alarm] = {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Return the alarms that this step's metrics raise; `active` has all current ones."""
        raised = []
        for rule in self._rules:
            value = metrics.get(rule.metric)
            if value is None or not math.isfinite(value):
                continue
            recent = self._recent.setdefault(rule.field, deque(maxlen=self._window))
            recent.append(value)
            if len(recent) < self._window:
                continue
            first = self._first.setdefault(rule.field, statistics.fmean(recent))
            limit = self._thresholds[rule.field]
            if rule.holds(limit, recent, first):
                self.active.pop(rule.field, None)
            elif rule.field not in self.active:
                text = rule.says.format(
                    value=f"{rule.value(recent):.4g}", limit=f"{limit:g}", first=f"{first:.4g}"
                )
                alarm = Alarm(rule, step, f"{text} (over {self._window} steps): {rule.remedy}")
                self.active[rule.field] = alarm
                raised.append(alarm)
        return raised
