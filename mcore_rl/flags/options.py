"""The `--rl-*` flags, next to Megatron's own arguments (`given`: the flags that are given).

Every field of `RLConfig` is one flag, and the only source of its name, type, default and help.
Megatron's flags keep their meaning; those that a checkpoint's config.json determines are derived
from it, and a given one that contradicts it is an error. Precedence: the command line, then
`--rl-config` (the later file first), then derived values.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameter, param, parameters_of

if TYPE_CHECKING:
    from mcore_rl.algorithms.recipes import Algorithm

FLOAT8 = "fp8"  # of --rl-export-dtype
_MAX_STALENESS = 4
_OVERSAMPLE_PARTIAL = 1.5


def _degree(name: str, model: str) -> Any:
    help = f"{name} size of the {model}; default: the actor's"
    return param(None, help, least=1, advice="drop it for the actor's")


@dataclass(frozen=True, slots=True)
class RLConfig:
    """The configuration of mcore_rl beyond Megatron's own arguments. One field, one flag."""

    # checkpoint, prompts, reward
    hf_checkpoint: str | None = param(None, "Hugging Face checkpoint folder to start from")
    prompts: str | None = param(None, "JSONL or Parquet file of training prompts")
    eval_prompts: str | None = param(None, "JSONL or Parquet file of held-out prompts")
    prompt_column: str = param("prompt", "column that holds the prompt (text or chat messages)")
    answer_column: str = param("answer", "column that holds the reference answer for the reward")
    no_chat_template: bool = param(
        False, "use prompts as they are in the file, without a chat template"
    )
    chat_template: str | None = param(
        None, "name of one of the tokenizer's chat templates, or a .jinja file"
    )
    chat_template_kwargs: str = param("{}", "arguments of the chat template, a JSON object")
    stop: tuple[str, ...] = param((), "text that ends a response; can be repeated")
    max_prompt_tokens: int = param(512, "drop and count prompts that are longer", above=0)
    max_response_tokens: int = param(
        512, "maximum number of generated tokens per response", above=0
    )
    cache_dir: str | None = param(None, "folder that caches tokenized prompts")
    reward: str | None = param(
        None,
        "exact_match, arithmetic, gsm8k, python_sandbox, http, pooling, model, environment, "
        "package.module:function, ./file.py:function or one of --rl-import; separate several by "
        "commas; default: exact_match, or environment with --rl-environment",
    )
    reward_weights: str | None = param(
        None,
        "one weight per reward, separated by commas; default: 1 each (write a negative first "
        "weight with =: --rl-reward-weights=-1,1)",
    )
    reward_workers: int = param(1, "reward processes per engine", above=0)
    reward_timeout_seconds: float = param(
        10.0, "time limit for the reward of a sample, in seconds", above=0
    )
    reward_memory_gib: float = param(
        4.0,
        "memory limit of a reward process, in GiB; a sample that exceeds it has no reward; 0 "
        "disables the limit",
        least=0,
        advice="0 disables the limit",
    )
    reward_env: str | None = param(
        None, "environment variables passed to reward processes besides PATH etc., comma-separated"
    )
    sandbox_accept: str | None = param(
        None, "protections that python_sandbox may lack, comma-separated (docs/using/security.md)"
    )
    reward_url: str | None = param(None, "endpoint of reward http (docs/using/rewards.md)")
    reward_http_batch: int = param(16, "samples per request of reward http", least=1)
    reward_http_concurrency: int = param(
        8, "concurrent requests of reward http per scoring rank", least=1
    )
    reward_http_retries: int = param(
        3, "retries of reward http after timeouts, 429 and 5xx", least=0
    )
    reward_http_header_env: str | None = param(
        None, "environment variable with a header for reward http, 'Name: value'"
    )
    reward_pooling_url: str | None = param(
        None, "vLLM server with a reward model, for reward pooling"
    )
    reward_pooling_header_env: str | None = param(
        None, "environment variable with a header for that server"
    )
    reward_model: str | None = param(
        None, "Hugging Face folder with a score head, for reward model; Megatron runs it"
    )
    reward_tp_size: int | None = _degree("TP", "reward model")
    reward_pp_size: int | None = _degree("PP", "reward model")
    reward_ep_size: int | None = _degree("EP", "reward model")
    reward_ranks: str | None = param(None, "ranks that only run the reward model, for example 6-7")

    environment: str | None = param(
        None,
        "environment that answers the model between turns: calculator, python_sandbox, "
        "package.module:Class, ./file.py:Class or one of --rl-import (docs/using/environments.md)",
    )
    environment_timeout: float = param(
        30.0,
        "time limit of each environment call, in seconds; a sample that exceeds it fails",
        above=0,
    )
    environment_memory_gib: float = param(
        4.0,
        "memory limit of an environment process, in GiB; a sample that exceeds it fails; 0 "
        "disables the limit",
        least=0,
        advice="0 disables the limit",
    )
    environment_env: str | None = param(
        None,
        "environment variables passed to environment processes besides PATH etc., comma-separated",
    )
    max_environments: int = param(
        256, "concurrent environment processes per TP group of an engine", least=1
    )
    max_turns: int = param(8, "maximum number of model turns per sample", least=1)
    max_turn_tokens: int | None = param(
        None,
        "maximum number of tokens per turn; default: what is left of --rl-max-response-tokens, "
        "which turns and observations share",
        least=1,
    )

    precision: str = param(
        "bf16", "precision of the trained parameters", choices=("bf16", "fp16", "fp32")
    )
    no_moe_grouped_gemm: bool = param(
        False,
        "run each expert separately instead of Transformer Engine's grouped GEMM",
    )
    routing_replay: str = param(
        "off",
        "experts that training uses: off: those its routers choose; r2: updates reuse those of the "
        "scoring pass; r3: scoring and updates reuse those of the engine",
        choices=("off", "r2", "r3"),
    )

    # algorithm
    algorithm: str = param(
        "grpo",
        "the recipe: ppo, grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, remax, opo, "
        "dapo, gspo, cispo, gmpo, sapo or one of --rl-import; other flags replace parts of it",
    )
    import_: tuple[str, ...] = param(
        (),
        "Python file with your estimators, losses, rewards and so on (mcore_rl.api) and their "
        "flags; can be repeated",
    )
    num_steps: int = param(100, "number of steps (rollout and update)", above=0)
    num_prompts_per_step: int = param(16, "prompts per step", above=0)
    num_mini_batches: int = param(1, "mini-batches per step, one optimizer update each", above=0)
    num_epochs: int = param(1, "optimizer passes over a step's samples", above=0)
    temperature: float = param(
        1.0, "sampling temperature; log-probs are those of the tempered policy", above=0
    )
    top_p: float | None = param(
        None,
        "sample from the most likely tokens with this probability mass",
        above=0,
        most=1,
        advice="give 1 to sample all tokens",
    )
    top_k: int | None = param(
        None, "sample from this many most likely tokens; 0: from all", least=0
    )
    critic_init: str | None = param(
        None, "Hugging Face folder that initializes the critic; default: the actor's"
    )
    critic_lr: float | None = param(None, "learning rate of the critic; default: --lr", least=0)
    critic_clip_grad: float | None = param(
        None, "gradient norm of the critic; default: --clip-grad", least=0
    )
    critic_warmup_steps: int | None = param(
        None, "initial steps that train only the critic", least=0
    )
    critic_tp_size: int | None = _degree("TP", "critic")
    critic_pp_size: int | None = _degree("PP", "critic")
    critic_ep_size: int | None = _degree("EP", "critic")
    critic_ranks: str | None = param(
        None, "ranks that only train the critic, beside the actor's, for example 4-7"
    )
    reference_refresh_interval: int = param(
        0, "steps between refreshes of the reference policy; 0 keeps the initial one", least=0
    )
    on_nonfinite_grad: str = param(
        "stop",
        "stop the run at a non-finite gradient, or skip the update",
        choices=("stop", "skip"),
    )
    load_or_start: bool = param(
        False, "start from --rl-hf-checkpoint if --load has no checkpoint yet, for restarted jobs"
    )
    on_changed_prompts: str = param(
        "stop",
        "what a resume does if --rl-prompts differ from the checkpoint's; restart begins at the "
        "first prompt",
        choices=("stop", "restart"),
    )

    # evaluation
    eval_interval: int = param(20, "steps between evaluations; 0 disables evaluation", least=0)
    num_eval_prompts: int = param(128, "held-out prompts per evaluation", above=0)
    eval_temperature: float = param(
        0.0, "sampling temperature of evaluations; 0 is greedy", least=0
    )

    # rollout engine and hand-over
    deterministic: bool = param(
        False,
        "assign prompts to engines in a fixed order instead of by free capacity, so that two runs "
        "compute the same batches",
    )
    rollout_tp_size: int = param(
        0, "TP size of a vLLM engine; 0: --tensor-model-parallel-size", least=0
    )
    rollout_ep_size: int = param(
        0,
        "EP size of a vLLM engine: TP size x its data-parallel ranks; 0: "
        "--expert-model-parallel-size if the engine supports it, else the TP size",
        least=0,
    )
    rollout_no_expert_parallel: bool = param(False, "split experts over TP instead of keeping EP")
    rollout_all2all_backend: str = param(
        "", "vLLM's all-to-all backend if experts span data-parallel ranks; empty: vLLM's default"
    )
    rollout_max_num_seqs: int = param(
        128, "maximum number of concurrent sequences per engine", above=0
    )
    rollout_kv_cache_gib: float = param(1.0, "KV cache per CPU rank, in GiB", above=0)
    rollout_gpu_memory_utilization: float = param(
        0.5,
        "share of GPU memory for vLLM",
        above=0,
        most=1,
        advice="it is a share of the GPU's memory",
    )
    rollout_enforce_eager: bool = param(False, "disable CUDA graphs in vLLM (always on CPU)")
    speculate: str = param("off", "speculative decoding: mtp:N, ngram:N (N draft tokens), or off")
    oversample: float | None = param(
        None,
        "groups sampled per group that a step trains on; a step takes those that finish first; "
        "default: 1, or 1.5 with --rl-partial-rollouts",
        least=1,
        advice="1 disables oversampling",
    )
    partial_rollouts: bool = param(
        False,
        "end a step's generation once its groups are complete; unfinished responses continue in "
        "later steps",
    )
    max_staleness: int | None = param(
        None,
        "with --rl-partial-rollouts, maximum number of weight versions between a sample's oldest "
        "token and the step that trains on it; default: 4",
        least=0,
        advice="0 finishes every response in the step that started it",
    )
    stale_rollouts: str = param(
        "finish",
        "groups that would exceed --rl-max-staleness: finish them in this step, or drop them",
        choices=("finish", "drop"),
    )
    kv_after_update: str = param(
        "recompute",
        "KV cache of responses that continue after an update: recompute it with the new weights, "
        "or keep it (without a GPU only)",
        choices=("recompute", "keep"),
    )
    ranks_per_node: int = param(
        0,
        "ranks per machine, which TP groups of engines do not cross; 0: as the launcher reports",
        least=0,
    )
    reshard_bucket_mb: int = param(512, "bucket size of a weight sync, in MiB", above=0)
    offload: str = param(
        "auto",
        "training state offloaded to host memory during rollout: gradients (or grads), optimizer, "
        "parameters (or params), comma-separated; none; auto: gradients and optimizer with a GPU, "
        "nothing without one",
    )
    offload_keep_gradients: bool = param(
        False, "preserve gradients when they are offloaded, instead of zeroing them"
    )
    reshard_dtype: str = param(
        "checkpoint",
        "dtype of weights in a weight sync, cast by the sender; checkpoint: fp16 with "
        "--rl-precision fp16, else the dtype of the checkpoint",
        choices=("checkpoint", "bf16", "fp16"),
    )
    reshard_delta: bool = param(
        False, "send only the blocks that changed since the last weight sync"
    )
    reshard_full_interval: int = param(
        20, "with --rl-reshard-delta, weight syncs between full transfers", above=0
    )

    attest: str = param(
        "sample",
        "how much of each weight sync is verified: full: every element; sample: one row of 32, "
        "different rows each time; off: nothing",
        choices=("full", "sample", "off"),
    )
    canary_interval: int = param(
        50,
        "weight syncs between comparisons of engine and actor log-probs; 0 disables them",
        least=0,
    )
    canary_tolerance: float = param(
        0.3,
        "maximum mean |difference| of these log-probs over a prompt's tokens, in nats; above it "
        "the weight sync is repeated, then the run stops; 0 only reports",
        least=0,
    )

    stage_timeout_seconds: float = param(
        3600.0,
        "time limit of a stage, in seconds; the run ends with a report of each rank; 0 disables it",
        least=0,
    )

    # health; a threshold of 0 switches its alarm off
    on_alarm: str = param(
        "warn",
        "what an alarm does: warn, or save a checkpoint and stop the run (exit code 75)",
        choices=("warn", "stop"),
    )
    alarm_window: int = param(
        10, "steps that an alarm considers", least=2, advice="one step is not a trend"
    )
    alarm_reward_std: float = param(
        1e-3, "alarm if the standard deviation of rewards is below this", least=0
    )
    alarm_kl: float = param(1.0, "alarm if the KL to the reference is above this", least=0)
    alarm_entropy: float = param(
        0.1, "alarm if the entropy is below this share of its first value", least=0
    )
    alarm_response_tokens: float = param(
        3.0, "alarm if response length changes by more than this factor", least=0
    )
    alarm_clip_fraction: float = param(
        0.5, "alarm if the share of clipped tokens is above this", least=0
    )
    alarm_mismatch: float = param(0.1, "alarm if kl/rollout_actor is above this", least=0)
    alarm_grad_norm: float = param(
        10.0, "alarm if the gradient norm is this many times the median of the last steps", least=0
    )
    alarm_host_growth_mib: float = param(
        64.0, "alarm if a rank's host memory grows by more than this per step, in MiB", least=0
    )
    alarm_device_growth_mib: float = param(
        64.0, "alarm if a rank's device memory grows by more than this per step, in MiB", least=0
    )
    alarm_expert_imbalance: float = param(
        0.0, "alarm if an expert gets more than this many times the mean load of its layer", least=0
    )
    alarm_unused_experts: float = param(
        0.5, "alarm if the share of experts without a token in a layer is above this", least=0
    )
    alarm_tokens_per_second: float = param(
        0.5, "alarm if rollout is slower than this share of its initial speed", least=0
    )

    # given parts of the algorithm and their parameters, which the parts declare
    parts: Mapping[str, Any] = field(default_factory=dict)

    # run directory and output
    run_dir: str | None = param(None, "directory of metrics, samples and checkpoints")
    run_name: str = param(
        "run", "prefix of the default run directory, runs/<name>-<date>-<time>.<n>"
    )
    num_logged_rollouts: int = param(8, "samples per step in rollouts.jsonl", least=0)
    export_hf: str | None = param(None, "Hugging Face folder to export the trained policy to")
    export_dtype: str = param(
        "auto",
        "dtype of the export; auto: that of --rl-hf-checkpoint, with bfloat16 for FP8 blocks; fp8: "
        "FP8 blocks, unchanged where training did not change them",
        choices=("auto", FLOAT8),
    )
    max_tokens_per_microbatch: int = param(
        0,
        "pack samples without padding into micro-batches of at most this many tokens, balanced "
        "over ranks; 0: pad --micro-batch-size samples to one length",
        least=0,
    )
    share_prompts: str = param(
        "auto",
        "compute a prompt once for its samples in a packed row; auto: if results do not change",
        choices=("auto", "on", "off"),
    )
    trace: int = param(
        0,
        "trace this many steps after the first one: files for ui.perfetto.dev and a table of times "
        "in the run directory's trace/",
        least=0,
    )
    log_prob_chunk_tokens: int = param(1024, "tokens whose logits are computed at a time", above=0)
    verify_out: str | None = param(None, "JSON file for the result of mcore_rl.verify")

    @classmethod
    def of(cls, **values: Any) -> RLConfig:
        """Return the configuration of flags by names without --rl-, including the algorithm's."""
        own = {parameter.name for parameter in parameters_of(cls)}
        return cls(
            **{name: frozen(value) for name, value in values.items() if name in own},
            parts={name: value for name, value in values.items() if name not in own},
        )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> RLConfig:
        """Return the `--rl-*` part of a parsed namespace; raise for a missing attribute, a bug."""
        own = {p.name: getattr(args, f"rl_{p.name}") for p in parameters_of(cls)}
        # A file unknown to the parser may have added some since.
        parts = {name: getattr(args, f"rl_{name}", None) for name in flags().keys() - own.keys()}
        return cls.of(**own, **{k: v for k, v in parts.items() if v is not None})

    def as_dict(self) -> dict[str, Any]:
        """Return every flag by name, parts of the algorithm as given or None."""
        values = {name: self.parts.get(name) for name in flags()}
        own = {p.name: getattr(self, p.name) for p in parameters_of(RLConfig)}
        return values | own | {"reward": self.rewards}

    @property
    def recipe(self) -> Algorithm:
        """The algorithm with the given parts; UsageError if they cannot be combined."""
        own = (parameter.name for parameter in parameters_of(RLConfig))
        asked = [name for name in own if name in ("top_p", "top_k") or name.startswith("critic_")]
        of_run = {name: getattr(self, name) for name in asked}
        given = {**self.parts, **{k: v for k, v in of_run.items() if v is not None}}
        return _recipe(self.algorithm, tuple(given.items()))

    @property
    def rewards(self) -> str:
        """The names of the rewards, separated by commas."""
        if self.reward is not None:
            return self.reward
        return "exact_match" if self.environment is None else "environment"

    @property
    def samples_per_prompt(self) -> int:
        return self.recipe.num_samples_per_prompt

    @property
    def samples_per_step(self) -> int:
        return self.num_prompts_per_step * self.samples_per_prompt

    @property
    def keeps_unfinished(self) -> bool:
        """Whether responses may continue in a later step than the one that began them."""
        return self.partial_rollouts and self.max_staleness != 0

    @property
    def keeps_kv(self) -> bool:
        """Whether keys and values outlive an update."""
        return self.keeps_unfinished and self.kv_after_update == "keep"

    @property
    def staleness_limit(self) -> int:
        """`max_staleness` or its default."""
        return _MAX_STALENESS if self.max_staleness is None else self.max_staleness

    @property
    def groups_at_a_time(self) -> float:
        """`oversample` or its default."""
        if self.oversample is not None:
            return self.oversample
        return _OVERSAMPLE_PARTIAL if self.keeps_unfinished else 1.0

    @property
    def directory(self) -> Path:
        """The run directory; before the run has one, the pattern of its name."""
        return Path(self.run_dir or f"runs/{self.run_name}-<date>-<time>.<n>")


def frozen(value: Any) -> Any:
    """Return argparse's lists as tuples, as in RLConfig."""
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def _recipe(name: str, given: tuple[tuple[str, Any], ...]) -> Algorithm:
    from mcore_rl.algorithms.recipes import resolve_algorithm  # torch, which flags do not need

    return resolve_algorithm(name, dict(given))


def flags() -> dict[str, Parameter]:
    """Return every `--rl-*` flag but --rl-config, by name: the run's, then those of the algorithms'
    parts, including a user's own. Raises UsageError for a name that is declared twice."""
    from mcore_rl.algorithms.recipes import declared_parameters  # imports torch

    found = {parameter.name: parameter for parameter in parameters_of(RLConfig)}
    for name, parameter in declared_parameters().items():
        if name in found or name == "config":
            raise UsageError(
                f"is a flag already, so that no loss or estimator of --rl-import can declare "
                f"{name}",
                flag=parameter.flag,
                remedy="rename it",
            )
        found[name] = parameter
    return found


def config_from(given: Mapping[str, Any]) -> RLConfig:
    """Return our flags among the given ones, by destination; the others at their defaults."""
    ours = {name: given[f"rl_{name}"] for name in flags() if f"rl_{name}" in given}
    return RLConfig.of(**ours)
