"""The table of charts: sections of panels, each a few metrics of one unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Each has a contrast of at least 3 on the light and on the dark background.
COLORS = (
    "#3d7fd6", "#d9731a", "#22976b", "#b059c4", "#d94f5c", "#12919e", "#8f7a2d", "#7a83e0",
    "#c2558d", "#6f8a2b", "#8a8f98",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of `series`, metric -> label. A metric `a/*/b` stands for all metrics that match.

    "lines" draws one line per metric. "band" takes a mean and a standard deviation. "stack" stacks
    the metrics; the last one is the total, and its bar shows the remainder. "map" draws one row per
    matching metric, in the order of their numbers. "timeline" draws the spans of timeline.jsonl,
    one row per role; its keys are names of spans.

    Example: `Panel("Entropy", {"entropy": "entropy"}, "Mean over tokens, in nats.", expected=True)`
    """

    title: str
    series: Mapping[str, str]
    note: str = ""
    unit: Literal["number", "share", "bytes", "seconds"] = "number"
    kind: Literal["lines", "band", "stack", "map", "timeline"] = "lines"
    expected: bool = False  # reported if it has no value; other panels are then hidden, also at 0
    from_zero: bool = False  # always so for bytes and seconds
    exact: bool = False  # no moving average: rare measurements, or a schedule


@dataclass(frozen=True, slots=True)
class Section:
    key: str  # in links
    title: str
    panels: tuple[Panel, ...]


# The stages of a step in their order. They do not overlap. The critic's seconds are part of
# log_probs and train, so they are not in the stack.
_STAGES = {
    "time/reshard_to_rollout_seconds": "hand-over to rollout", "time/eval_seconds": "evaluation",
    "time/data_seconds": "data", "time/rollout_seconds": "rollout", "time/reward_seconds": "reward",
    "time/reshard_to_train_seconds": "hand-over to training",
    "time/log_probs_seconds": "log-probs", "time/advantages_seconds": "advantages",
    "time/train_seconds": "train", "time/checkpoint_seconds": "checkpoint",
    "time/step_seconds": "other",
}  # fmt: skip
# Stages and engine spans by the labels above, and so in the same colors.
_SPANS = {
    **{name[len("time/") : -len("_seconds")]: label for name, label in [*_STAGES.items()][:-1]},
    "update": "hand-over to rollout", "sampling": "rollout", "idle": "idle",
}  # fmt: skip
_EVEN = "Times the mean of its layer; 1 is even."

SECTIONS = (
    Section("learning", "What is learned", (
        Panel("Reward", {"reward/mean": "mean", "reward/std": "± one standard deviation"},
            "Mean over a step's samples; the band is one standard deviation of them.", kind="band",
            expected=True),
        Panel("Held-out accuracy", {"eval/accuracy": "accuracy"}, "Share of held-out prompts with "
            "a reward of at least 1, before the update of the step.", "share", exact=True,
            expected=True),
        Panel("Held-out accuracy by set", {"eval/*/accuracy": ""},
            "Of each set of --rl-eval-prompts.", "share", exact=True),
        Panel("pass@k", {"eval/pass@*": ""}, "Of --rl-eval-samples, with the ends of 95 % "
            "intervals.", "share", exact=True),
        Panel("Accuracy by source", {"source/*/accuracy": ""},
            "Share of a source's samples with a reward of at least 1.", "share"),
        Panel("Reward by source", {"source/*/reward_mean": ""},
            "Mean over a source's samples of the step."),
        Panel("Curriculum", {"curriculum/settled_share": "settled"}, "Share of prompts whose "
            "responses were all right or all wrong when they were last drawn.", "share"),
        Panel("Loss of demonstrations", {"loss/sft": "training", "eval/loss": "held out"},
            "Mean cross-entropy of the tokens to learn, in nats."),
        Panel("Loss of pairs", {"loss/dpo": "loss"}, "DPO's, before the update of the step."),
        Panel("Margins of pairs", {"dpo/accuracy": "positive"},
            "Share of pairs whose chosen response gained more than the rejected one.", "share"),
        Panel("KL to the reference", {"kl/ref": "KL"},
            "Mean over tokens; 0 if no KL is computed.", expected=True),
        Panel("Reverse KL to the teacher", {"teacher/reverse_kl": "KL"},
            "Mean over tokens of the log-probs' difference, before the update of the step."),
        Panel("Entropy", {"entropy": "entropy"}, "Mean over tokens, in nats.", expected=True),
        Panel("Rewards by part", {"reward/*/mean": ""}, "Each before its weight."),
        Panel("Coefficient of the KL", {"kl/coef": "coefficient"}, exact=True),
    )),
    Section("update", "Updates, and engine against actor", (
        Panel("Mismatch of engine and actor", {"kl/rollout_actor": "KL"},
            "k3 estimate of the KL between vLLM's and Megatron's log-probs, same weights.",
            expected=True),
        Panel("Log-probs of engine and actor",
            {"mismatch/mean_abs_difference": "mean |difference|"},
            "In nats, over tokens, of the same weights.", from_zero=True),
        Panel("Correction of the mismatch", {"mismatch/mean_weight": "mean weight",
            "mismatch/effective_sample_size": "effective sample size",
            "mismatch/masked_share": "masked", "mismatch/truncated_share": "truncated"},
            unit="share"),
        Panel("Centered scores", {"centering/engine_mass": "engine",
            "centering/actor_mass": "actor", "centering/coefficients_l1": "coefficients"},
            "Probability of the engine's --rl-score-centering most probable tokens.", "share"),
        Panel("Gradient norm", {"grad_norm": "norm"}, from_zero=True, expected=True),
        Panel("Policy loss", {"loss/policy": "loss"}, expected=True),
        Panel("Clipped and skipped", {"clip_fraction": "tokens clipped",
            "skipped_updates": "updates skipped"}),
        Panel("Ratio to the old policy", {"ratio/mean": "mean"}),
        Panel("Learning rate", {"learning_rate": "actor", "critic/learning_rate": "critic"},
            exact=True),
    )),
    Section("responses", "Responses", (
        Panel("Length of responses", {"response_tokens/mean": "mean tokens"}, from_zero=True,
            expected=True),
        Panel("Cut at the limit", {"response_tokens/cut_share": "cut"},
            "Share of responses that reach --rl-max-response-tokens.", "share", from_zero=True,
            expected=True),
        Panel("Drafts accepted", {"rollout/draft_acceptance": "accepted"},
            "Share of tokens drafted by --rl-speculate.", "share", from_zero=True),
        Panel("Prompts drawn again", {"rollout/refills": "refills",
            "rollout/uninformative_share": "uninformative share",
            "rollout/dropped_samples": "samples dropped", "reward/failures": "rewards failed"}),
        Panel("Groups dropped and pending", {"rollout/dropped_groups": "dropped",
            "rollout/pending_groups": "pending"}, "Of --rl-oversample and --rl-partial-rollouts."),
        Panel("Age of samples", {"rollout/staleness_mean": "mean",
            "rollout/staleness_max": "oldest"}, "Versions between the oldest token of a sample and "
            "the step's weights."),
    )),
    Section("time", "Time", (
        Panel("Stages of a step", _STAGES, "On the first rank's clock; they add up to the "
            "step.", "seconds", "stack", expected=True),
        Panel("Timeline", _SPANS, "The last steps; a number is at the beginning of its step.",
            kind="timeline"),
        Panel("Idle", {"idle/trainers": "trainers", "idle/engines": "engines"}, "Share of the time "
            "from the end of one step's sampling to the end of the next in which they wait for "
            "each other.", "share", from_zero=True),
        Panel("Throughput", {"throughput/rollout_tokens_per_second": "rollout",
            "throughput/train_tokens_per_second": "training"}, "Tokens per second of the stage, "
            "all ranks together.", from_zero=True, expected=True),
    )),
    Section("handover", "Hand-over of the weights", (
        Panel("Bytes received, against the lower bound", {"reshard/received_bytes_max": "received",
            "reshard/lower_bound_bytes_max": "lower bound"}, "On the rank that receives the most.",
            "bytes", expected=True),
        Panel("Seconds of a hand-over", {"time/reshard_to_rollout_seconds": "to rollout",
            "time/reshard_to_train_seconds": "to training"}, unit="seconds", expected=True),
        Panel("Memory it takes in passing", {"reshard/peak_extra_bytes_max": "peak"},
            "On the rank that takes the most; limited by --rl-reshard-bucket-mb.", "bytes",
            expected=True),
        Panel("Offload", {"offload/moved_bytes_max": "moved", "offload/saved_bytes_max": "saved"},
            unit="bytes"),
    )),
    Section("memory", "Memory", (
        Panel("Host memory of the largest rank", {"memory/host_peak_bytes": "peak",
            "memory/host_bytes": "now"}, unit="bytes", expected=True),
        Panel("Device memory of the largest rank", {"memory/device_peak_bytes": "peak",
            "memory/device_bytes": "now"}, unit="bytes"),
        Panel("Open files of the largest rank", {"memory/open_files": "files"}, from_zero=True,
            exact=True),
    )),
    Section("critic", "Critic", (
        Panel("Value loss", {"loss/value": "loss"}),
        Panel("Explained variance", {"critic/explained_variance": "explained variance"}),
        Panel("Values and returns", {"critic/value_mean": "value", "critic/return_mean": "return"}),
        Panel("Critic's gradient norm", {"critic/grad_norm": "norm"}, from_zero=True),
        Panel("Critic's clipping", {"critic/clip_fraction": "values clipped",
            "critic/skipped_updates": "updates skipped"}),
        Panel("Critic's share of the step", {"critic/values_seconds": "values",
            "critic/update_seconds": "update"}, unit="seconds"),
        Panel("Memory of the critic's own ranks", {"critic/host_peak_bytes": "host, peak",
            "critic/device_peak_bytes": "device, peak"}, unit="bytes"),
    )),
    Section("moe", "Experts", (
        Panel("Load of the busiest expert", {"moe/imbalance": "times the mean"},
            "In the layer where it is highest; 1 is even."),
        Panel("Experts without a token", {"moe/unused_experts": "all layers",
            "moe/most_unused_experts": "worst layer"}, unit="share", from_zero=True),
        Panel("Tokens with the engine's experts", {"moe/replayed_share": "replayed"},
            "--rl-routing-replay; the rest keeps the trainer's own.", "share", from_zero=True,
            exact=True),
        Panel("Choices in which trainer and engine differ",
            {"moe/routing_disagreement": "all layers"}, "Of the trainer's routers, for the same "
            "tokens and weights.", "share", from_zero=True),
        Panel("Choices that differ, by layer", {"moe/routing_disagreement/layer_*": ""},
            unit="share", kind="map"),
        Panel("Busiest expert in training, by layer", {"moe/imbalance/layer_*": ""}, _EVEN,
            kind="map"),
        Panel("Experts without a token, by layer", {"moe/unused_experts/layer_*": ""}, unit="share",
            kind="map"),
        Panel("Busiest expert in rollout, by layer", {"moe/rollout_imbalance/layer_*": ""}, _EVEN,
            kind="map"),
    )),
    Section("health", "Health", (
        Panel("Alarms that last", {"health/alarms": "alarms"}, "The chart of its metric has a "
            "mark where an alarm is raised.", exact=True, from_zero=True),
    )),
)  # fmt: skip
