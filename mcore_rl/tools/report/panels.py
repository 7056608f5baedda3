"""What the page charts: sections of panels, each a few metrics with a title and a unit. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LINES, BAND, STACK, MAP = "lines", "band", "stack", "map"
NUMBER, SHARE, BYTES, SECONDS = "number", "share", "bytes", "seconds"


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of `metrics` (name and label each), which have one unit.

    LINES draws one line a metric. BAND takes a mean and a standard deviation. STACK puts the
    metrics on each other; what is missing of `total` is stacked as "other". MAP has a row for each
    of the `rest`, in the order of the number that ends its name, and a colour for each value.
    """

    key: str
    title: str
    metrics: tuple[tuple[str, str], ...]
    unit: str = NUMBER
    kind: str = LINES
    note: str = ""
    total: str = ""
    from_zero: bool = False
    optional: bool = False  # not missed where a run does not measure it, or measures 0
    exact: bool = False  # what no average is drawn over: seldom measured, or a schedule
    rest: str = ""  # metrics that begin and end so, "a/*/b", are drawn as well


@dataclass(frozen=True, slots=True)
class Section:
    key: str
    title: str
    panels: tuple[Panel, ...]


def _by_layer(name: str, title: str, unit: str = NUMBER) -> Panel:
    """The map of a metric of experts."""
    metric = "moe/routing_disagreement" if name == "disagreement" else f"moe/{name}"
    note = "" if unit == SHARE else "Times the mean of its layer; 1 is even."
    rest = f"{metric}/layer_*"
    return Panel(f"{name}-by-layer", title, (), unit, MAP, note, optional=True, rest=rest)


# In the order they have within a step. None lies within another: `StageTimers` are entered one
# after the other, and the two hand-overs lie outside of all. The critic's own seconds lie within
# log_probs and train, and are no part of the stack.
_STACKED = (
    ("reshard_to_rollout", "hand-over to rollout"),
    ("eval", "evaluation"),
    ("data", "data"),
    ("rollout", "rollout"),
    ("reward", "reward"),
    ("reshard_to_train", "hand-over to training"),
    ("log_probs", "log-probs"),
    ("advantages", "advantages"),
    ("train", "train"),
    ("checkpoint", "checkpoint"),
)

SECTIONS = (
    Section(
        "learning",
        "What is learnt",
        (
            Panel(
                "reward",
                "Reward",
                (("reward/mean", "mean"), ("reward/std", "± one standard deviation")),
                kind=BAND,
                note="Mean over a step's samples; the band is one standard deviation of them.",
            ),
            Panel(
                "accuracy",
                "Held-out accuracy",
                (("eval/accuracy", "accuracy"),),
                unit=SHARE,
                exact=True,
                note="Share of held-out prompts with a reward of at least 1, before the update of "
                "the step.",
            ),
            Panel(
                "kl",
                "KL to the reference",
                (("kl/ref", "KL"),),
                note="Mean over tokens; 0 throughout where no KL is asked for.",
            ),
            Panel(
                "entropy", "Entropy", (("entropy", "entropy"),), note="Mean over tokens, in nats."
            ),
            Panel(
                "reward-parts",
                "Rewards by part",
                (),
                note="Each before its weight.",
                optional=True,
                rest="reward/*/mean",
            ),
            Panel(
                "kl-coefficient",
                "Coefficient of the KL",
                (("kl/coef", "coefficient"),),
                optional=True,
                exact=True,
            ),
        ),
    ),
    Section(
        "update",
        "Updates, and engine against actor",
        (
            Panel(
                "mismatch",
                "Mismatch of engine and actor",
                (("kl/rollout_actor", "KL"),),
                note="k3 estimate of the KL between vLLM's and Megatron's log-probs, same weights.",
            ),
            Panel(
                "mismatch-difference",
                "Log-probs of engine and actor",
                (("mismatch/mean_abs_difference", "mean |difference|"),),
                from_zero=True,
                optional=True,
                note="In nats, over tokens, of the same weights.",
            ),
            Panel(
                "mismatch-weights",
                "Correction of the mismatch",
                (
                    ("mismatch/mean_weight", "mean weight"),
                    ("mismatch/effective_sample_size", "effective sample size"),
                    ("mismatch/masked_share", "masked"),
                    ("mismatch/truncated_share", "truncated"),
                ),
                unit=SHARE,
                optional=True,
            ),
            Panel("grad-norm", "Gradient norm", (("grad_norm", "norm"),), from_zero=True),
            Panel("loss", "Policy loss", (("loss/policy", "loss"),)),
            Panel(
                "clip",
                "Clipped and skipped",
                (("clip_fraction", "tokens clipped"), ("skipped_updates", "updates skipped")),
                optional=True,
            ),
            Panel("ratio", "Ratio to the old policy", (("ratio/mean", "mean"),), optional=True),
            Panel(
                "learning-rate",
                "Learning rate",
                (("learning_rate", "actor"), ("critic/learning_rate", "critic")),
                optional=True,
                exact=True,
            ),
        ),
    ),
    Section(
        "responses",
        "Responses",
        (
            Panel(
                "lengths",
                "Length of responses",
                (("response_tokens/mean", "mean tokens"),),
                from_zero=True,
            ),
            Panel(
                "cut",
                "Cut at the limit",
                (("response_tokens/cut_share", "cut"),),
                unit=SHARE,
                from_zero=True,
                note="Share of responses that reach --rl-max-response-tokens.",
            ),
            Panel(
                "drafts",
                "Drafts accepted",
                (("rollout/draft_acceptance", "accepted"),),
                unit=SHARE,
                from_zero=True,
                optional=True,
                note="Share of tokens drafted by --rl-speculate.",
            ),
            Panel(
                "draws",
                "Prompts drawn again",
                (
                    ("rollout/refills", "refills"),
                    ("rollout/uninformative_share", "uninformative share"),
                    ("rollout/dropped_samples", "samples dropped"),
                    ("reward/failures", "rewards failed"),
                ),
                optional=True,
            ),
            Panel(
                "unfinished",
                "Groups dropped and pending",
                (
                    ("rollout/dropped_groups", "dropped"),
                    ("rollout/pending_groups", "pending"),
                ),
                optional=True,
                note="Of --rl-oversample and --rl-partial-rollouts.",
            ),
            Panel(
                "staleness",
                "Age of samples",
                (
                    ("rollout/staleness_mean", "mean"),
                    ("rollout/staleness_max", "oldest"),
                ),
                optional=True,
                note="Versions between the oldest token of a sample and the step's weights.",
            ),
        ),
    ),
    Section(
        "time",
        "Time",
        (
            Panel(
                "stages",
                "Stages of a step",
                tuple((f"time/{stage}_seconds", label) for stage, label in _STACKED),
                unit=SECONDS,
                kind=STACK,
                total="time/step_seconds",
                note="As the first rank's clock has them; together they are the step.",
            ),
            Panel(
                "throughput",
                "Throughput",
                (
                    ("throughput/rollout_tokens_per_second", "rollout"),
                    ("throughput/train_tokens_per_second", "training"),
                ),
                from_zero=True,
                note="Tokens per second of the stage, all ranks together.",
            ),
        ),
    ),
    Section(
        "handover",
        "Hand-over of the weights",
        (
            Panel(
                "handover-bytes",
                "Bytes received, against the lower bound",
                (
                    ("reshard/received_bytes_max", "received"),
                    ("reshard/lower_bound_bytes_max", "lower bound"),
                ),
                unit=BYTES,
                from_zero=True,
                note="Of the rank that receives the most.",
            ),
            Panel(
                "handover-seconds",
                "Seconds of a hand-over",
                (
                    ("time/reshard_to_rollout_seconds", "to rollout"),
                    ("time/reshard_to_train_seconds", "to training"),
                ),
                unit=SECONDS,
                from_zero=True,
            ),
            Panel(
                "handover-peak",
                "Memory it takes in passing",
                (("reshard/peak_extra_bytes_max", "peak"),),
                unit=BYTES,
                from_zero=True,
                note="Of the rank that takes the most; under --rl-reshard-bucket-mb.",
            ),
            Panel(
                "offload",
                "Offload",
                (("offload/moved_bytes_max", "moved"), ("offload/saved_bytes_max", "saved")),
                unit=BYTES,
                from_zero=True,
                optional=True,
            ),
        ),
    ),
    Section(
        "memory",
        "Memory",
        (
            Panel(
                "host-memory",
                "Host memory of the largest rank",
                (("memory/host_peak_bytes", "peak"), ("memory/host_bytes", "now")),
                unit=BYTES,
                from_zero=True,
            ),
            Panel(
                "device-memory",
                "Device memory of the largest rank",
                (("memory/device_peak_bytes", "peak"), ("memory/device_bytes", "now")),
                unit=BYTES,
                from_zero=True,
                optional=True,
            ),
            Panel(
                "open-files",
                "Open files of the largest rank",
                (("memory/open_files", "files"),),
                exact=True,
                from_zero=True,
                optional=True,
            ),
        ),
    ),
    Section(
        "critic",
        "Critic",
        (
            Panel("value-loss", "Value loss", (("loss/value", "loss"),), optional=True),
            Panel(
                "explained-variance",
                "Explained variance",
                (("critic/explained_variance", "explained variance"),),
                optional=True,
            ),
            Panel(
                "values",
                "Values and returns",
                (("critic/value_mean", "value"), ("critic/return_mean", "return")),
                optional=True,
            ),
            Panel(
                "critic-grad-norm",
                "Critic's gradient norm",
                (("critic/grad_norm", "norm"),),
                from_zero=True,
                optional=True,
            ),
            Panel(
                "critic-clip",
                "Critic's clipping",
                (
                    ("critic/clip_fraction", "values clipped"),
                    ("critic/skipped_updates", "updates skipped"),
                ),
                optional=True,
            ),
            Panel(
                "critic-seconds",
                "Critic's share of the step",
                (("critic/values_seconds", "values"), ("critic/update_seconds", "update")),
                unit=SECONDS,
                from_zero=True,
                optional=True,
            ),
            Panel(
                "critic-memory",
                "Memory of the critic's own ranks",
                (
                    ("critic/host_peak_bytes", "host, peak"),
                    ("critic/device_peak_bytes", "device, peak"),
                ),
                unit=BYTES,
                from_zero=True,
                optional=True,
            ),
        ),
    ),
    Section(
        "moe",
        "Experts",
        (
            Panel(
                "imbalance",
                "Load of the busiest expert",
                (("moe/imbalance", "times the mean"),),
                optional=True,
                note="In the layer where it is highest; 1 is even.",
            ),
            Panel(
                "unused",
                "Experts without a token",
                (
                    ("moe/unused_experts", "all layers"),
                    ("moe/most_unused_experts", "worst layer"),
                ),
                unit=SHARE,
                from_zero=True,
                optional=True,
            ),
            Panel(
                "replayed",
                "Tokens with the engine's experts",
                (("moe/replayed_share", "replayed"),),
                unit=SHARE,
                from_zero=True,
                optional=True,
                exact=True,
                note="--rl-routing-replay; the rest keeps the trainer's own.",
            ),
            Panel(
                "disagreement",
                "Choices in which trainer and engine differ",
                (("moe/routing_disagreement", "all layers"),),
                unit=SHARE,
                from_zero=True,
                optional=True,
                note="Of the trainer's routers, asked for the same tokens with the same weights.",
            ),
            _by_layer("disagreement", "Choices that differ, by layer", unit=SHARE),
            _by_layer("imbalance", "Busiest expert in training, by layer"),
            _by_layer("unused_experts", "Experts without a token, by layer", unit=SHARE),
            _by_layer("rollout_imbalance", "Busiest expert in rollout, by layer"),
        ),
    ),
    Section(
        "health",
        "Health",
        (
            Panel(
                "alarms",
                "Alarms that last",
                (("health/alarms", "alarms"),),
                exact=True,
                from_zero=True,
                optional=True,
                note="Where one is raised, the chart of its metric has a mark.",
            ),
        ),
    ),
)
