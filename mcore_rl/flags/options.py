"""The `--rl-*` flags, and how they join Megatron's own arguments (`given_flags`: what is given).

Every field of `RLConfig` is one flag, which has its name, type, default and help from there alone.
Megatron's flags keep their meaning; those that a checkpoint's config.json decides are derived from
it, and one that is given and contradicts it is an error. Precedence: the command line, then
`--rl-config` (the later file first), then what is derived.
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


@dataclass(frozen=True, slots=True)
class RLConfig:
    """Everything mcore_rl is told beyond Megatron's own arguments. One field, one flag."""

    # checkpoint, prompts, reward
    hf_checkpoint: str | None = param(None, "Hugging Face checkpoint folder to start from")
    prompts: str | None = param(None, "JSONL or Parquet file of training prompts")
    eval_prompts: str | None = param(None, "JSONL or Parquet file of held-out prompts")
    prompt_column: str = param("prompt", "column that holds the prompt (text or chat messages)")
    answer_column: str = param("answer", "column that holds what the reward compares with")
    no_chat_template: bool = param(False, "give prompts to the model as they stand in the file")
    chat_template: str | None = param(None, "one of the tokenizer's templates, or a .jinja file")
    chat_template_kwargs: str = param("{}", "arguments of the chat template, a JSON object")
    stop: tuple[str, ...] = param((), "text that ends a response; several may be given")
    max_prompt_tokens: int = param(512, "longer prompts are dropped, and counted", above=0)
    max_response_tokens: int = param(512, "generation stops after this many tokens", above=0)
    cache_dir: str | None = param(None, "folder for tokenised prompts")
    reward: str | None = param(
        None,
        "exact_match, arithmetic, gsm8k, python_sandbox, http, pooling, model, environment, "
        "package.module:function, ./file.py:function or one of --rl-import; several with commas; "
        "default: exact_match, with --rl-environment environment",
    )
    reward_weights: str | None = param(
        None,
        "a weight for each reward, with commas; default 1 (a negative first one needs a =: "
        "--rl-reward-weights=-1,1)",
    )
    reward_workers: int = param(1, "reward processes per engine", above=0)
    reward_timeout_seconds: float = param(10.0, "seconds that a sample's reward has", above=0)
    reward_memory_gib: float = param(
        4.0,
        "memory of a reward process, in GiB; a sample that needs more is left out; 0: no limit",
        least=0,
        advice="0 is no limit",
    )
    reward_env: str | None = param(
        None, "environment variables that reward processes get, with commas, besides PATH etc."
    )
    sandbox_accept: str | None = param(
        None, "what python_sandbox may leave unprotected, with commas (docs/using/security.md)"
    )
    reward_url: str | None = param(None, "endpoint of reward http (docs/using/rewards.md)")
    reward_http_batch: int = param(16, "samples per request to it", least=1)
    reward_http_concurrency: int = param(8, "requests at a time, per scoring rank", least=1)
    reward_http_retries: int = param(3, "further attempts after timeouts, 429 and 5xx", least=0)
    reward_http_header_env: str | None = param(
        None, "environment variable that holds a header for it, 'Name: value'"
    )
    reward_pooling_url: str | None = param(None, "vLLM server with a reward model, for pooling")
    reward_pooling_header_env: str | None = param(
        None, "environment variable that holds a header for that server"
    )
    reward_model: str | None = param(
        None, "Hugging Face folder with a score head, for reward model, run by Megatron"
    )
    reward_tp_size: int | None = param(
        None, "TP of the model; default: the actor's", least=1, advice="drop it for the actor's"
    )
    reward_pp_size: int | None = param(
        None, "PP of the model; default: the actor's", least=1, advice="drop it for the actor's"
    )
    reward_ep_size: int | None = param(
        None, "EP of the model; default: the actor's", least=1, advice="drop it for the actor's"
    )
    reward_ranks: str | None = param(None, "ranks of the model's own, like 6-7")

    environment: str | None = param(
        None,
        "what answers the model between turns: calculator, python_sandbox, package.module:Class, "
        "./file.py:Class or one of --rl-import (docs/using/environments.md)",
    )
    environment_timeout: float = param(
        30.0,
        "seconds of each of its calls; a sample whose environment takes longer is lost",
        above=0,
    )
    environment_memory_gib: float = param(
        4.0,
        "memory of an environment's process, in GiB; a sample that needs more is lost; 0: no limit",
        least=0,
        advice="0 is no limit",
    )
    environment_env: str | None = param(
        None,
        "environment variables that its processes get, with commas, besides PATH and the like",
    )
    max_environments: int = param(
        256, "environments, a process each, at one time per TP group of an engine", least=1
    )
    max_turns: int = param(8, "turns of the model, after which its sample ends", least=1)
    max_turn_tokens: int | None = param(
        None,
        "tokens of one turn; default: what is left of --rl-max-response-tokens, which turns and "
        "observations share",
        least=1,
    )

    precision: str = param("bf16", "of parameters in training", choices=("bf16", "fp16", "fp32"))
    no_moe_grouped_gemm: bool = param(
        False,
        "each expert its own layers, where Transformer Engine would compute all of them together",
    )
    routing_replay: str = param(
        "off",
        "experts that training uses: its routers' own choice; r2: in updates those of the scoring "
        "pass before; r3: in both those that the engine sampled with",
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
        "your own .py file of estimators, losses, rewards and so on (mcore_rl.api), whose flags "
        "join these; several may be given",
    )
    num_steps: int = param(100, "rollout-and-update steps", above=0)
    num_prompts_per_step: int = param(16, "prompts drawn per step", above=0)
    num_mini_batches: int = param(1, "parts of a step's samples, an update each", above=0)
    num_epochs: int = param(1, "how often a step's samples are learnt from", above=0)
    temperature: float = param(
        1.0, "sampling temperature; log-probs are of the tempered policy", above=0
    )
    top_p: float | None = param(
        None,
        "sample from the likeliest tokens of this mass",
        above=0,
        most=1,
        advice="give 1 to sample all tokens",
    )
    top_k: int | None = param(None, "sample from so many likeliest tokens; 0: from all", least=0)
    critic_init: str | None = param(
        None, "Hugging Face folder of the critic, a reward model's say; default: the actor's"
    )
    critic_lr: float | None = param(None, "learning rate of the critic; default: --lr", least=0)
    critic_clip_grad: float | None = param(None, "gradient norm; default: --clip-grad", least=0)
    critic_warmup_steps: int | None = param(
        None, "steps at first that train the critic alone", least=0
    )
    critic_tp_size: int | None = param(
        None, "TP of the critic; default: the actor's", least=1, advice="drop it for the actor's"
    )
    critic_pp_size: int | None = param(
        None, "PP of the critic; default: the actor's", least=1, advice="drop it for the actor's"
    )
    critic_ep_size: int | None = param(
        None, "EP of the critic; default: the actor's", least=1, advice="drop it for the actor's"
    )
    critic_ranks: str | None = param(
        None, "ranks of the critic's own, like 4-7, which train while the actor's do"
    )
    reference_refresh_interval: int = param(
        0, "steps from one renewal of the reference policy to the next; 0 keeps the first", least=0
    )
    on_nonfinite_grad: str = param(
        "stop", "what a non-finite gradient does to the run", choices=("stop", "skip")
    )
    load_or_start: bool = param(
        False, "begin where nothing is saved in --load yet, as a job that is started again needs it"
    )
    on_changed_prompts: str = param(
        "stop",
        "what --load does if --rl-prompts are others than the checkpoint's; restart begins with "
        "the first of them",
        choices=("stop", "restart"),
    )

    # evaluation
    eval_interval: int = param(20, "steps between evaluations; 0 evaluates never", least=0)
    num_eval_prompts: int = param(128, "held-out prompts per evaluation", above=0)
    eval_temperature: float = param(0.0, "0 is greedy", least=0)

    # rollout engine and hand-over
    deterministic: bool = param(
        False,
        "deal prompts to engines in turn and not as they have room: two runs then compute the same "
        "in the same batches",
    )
    rollout_tp_size: int = param(
        0, "TP size of a vLLM engine; 0 takes --tensor-model-parallel-size", least=0
    )
    rollout_ep_size: int = param(
        0,
        "EP size of a vLLM engine: TP size x its data-parallel ranks; 0 keeps "
        "--expert-model-parallel-size where the engine can, and else takes the TP size",
        least=0,
    )
    rollout_no_expert_parallel: bool = param(False, "split experts over TP instead of keeping EP")
    rollout_all2all_backend: str = param(
        "", "vLLM's all-to-all backend where experts span data-parallel ranks; empty: its default"
    )
    rollout_max_num_seqs: int = param(128, "sequences in flight per engine", above=0)
    rollout_kv_cache_gib: float = param(1.0, "KV cache per CPU rank", above=0)
    rollout_gpu_memory_utilization: float = param(
        0.5,
        "share of a GPU that vLLM may take",
        above=0,
        most=1,
        advice="it is a share of the GPU's memory",
    )
    rollout_enforce_eager: bool = param(False, "no CUDA graphs in vLLM (always so on CPU)")
    speculate: str = param("off", "tokens that engines draft and then verify: mtp:N, ngram:N, off")
    oversample: float | None = param(
        None,
        "groups that are sampled at a time, for each that a step takes: it takes those that finish "
        "first; default: 1, with --rl-partial-rollouts 1.5",
        least=1,
        advice="1 starts those that it takes",
    )
    partial_rollouts: bool = param(
        False,
        "end a step's generation when its groups are there; what is unfinished goes on in later "
        "steps, from its tokens",
    )
    max_staleness: int | None = param(
        None,
        "with --rl-partial-rollouts, versions of the weights between a sample's oldest token and "
        "the step that learns from it; default: 4",
        least=0,
        advice="0 lets every response end in the step that began it",
    )
    stale_rollouts: str = param(
        "finish",
        "groups that would get older: they end in this step, or are dropped",
        choices=("finish", "drop"),
    )
    kv_after_update: str = param(
        "recompute",
        "keys and values of responses that go on after an update: computed anew by its weights, or "
        "kept, where engines have them still: without a GPU",
        choices=("recompute", "keep"),
    )
    ranks_per_node: int = param(
        0,
        "processes on one machine, which engines' TP groups do not leave; 0 asks the launcher",
        least=0,
    )
    reshard_bucket_mb: int = param(512, "bytes in flight during a hand-over, in MiB", above=0)
    offload: str = param(
        "auto",
        "what training keeps in host memory during rollout: gradients (or grads), optimizer, "
        "parameters (or params), with commas; none; or auto: gradients and optimizer with a GPU. "
        "Without one copies lie in the same memory and save nothing",
    )
    offload_keep_gradients: bool = param(
        False, "copy gradients when they are offloaded, instead of zeroing them afterwards"
    )
    reshard_dtype: str = param(
        "checkpoint",
        "dtype in which weights travel, a cast at the source; checkpoint: fp16 with --rl-precision "
        "fp16, else that of the checkpoint",
        choices=("checkpoint", "bf16", "fp16"),
    )
    reshard_delta: bool = param(False, "send only blocks that changed since the last hand-over")
    reshard_full_interval: int = param(
        20, "with --rl-reshard-delta, hand-overs from one full transfer to the next", above=0
    )

    attest: str = param(
        "sample",
        "how much of a hand-over is proved to have arrived: every element, one row of 32 (other "
        "rows each time), or nothing",
        choices=("full", "sample", "off"),
    )
    canary_interval: int = param(
        50,
        "hand-overs from one comparison of both sides' log-probs to the next; 0 compares never",
        least=0,
    )
    canary_tolerance: float = param(
        0.3,
        "how far these may be apart: the mean |difference| over a prompt's tokens, in nats, beyond "
        "which the hand-over is repeated and then the run stops; 0 compares and never stops",
        least=0,
    )

    stage_timeout_seconds: float = param(
        3600.0,
        "a stage that takes longer ends the run, and says what each rank does; 0 waits",
        least=0,
    )

    # health; a threshold of 0 switches its alarm off
    on_alarm: str = param(
        "warn",
        "what an alarm does: a warning, or a checkpoint and the end of the run (exit code 75)",
        choices=("warn", "stop"),
    )
    alarm_window: int = param(
        10, "steps that an alarm looks at", least=2, advice="one step is no trend"
    )
    alarm_reward_std: float = param(
        1e-3, "alarm if the standard deviation of rewards is lower", least=0
    )
    alarm_kl: float = param(1.0, "alarm if the KL to the reference is higher", least=0)
    alarm_entropy: float = param(
        0.1, "alarm if the entropy is below this share of the first", least=0
    )
    alarm_response_tokens: float = param(
        3.0, "alarm if responses get longer or shorter by more than this factor", least=0
    )
    alarm_clip_fraction: float = param(0.5, "alarm if a larger share of tokens is clipped", least=0)
    alarm_mismatch: float = param(0.1, "alarm if kl/rollout_actor is higher", least=0)
    alarm_grad_norm: float = param(
        10.0, "alarm if the gradient norm is so many times the median of the last steps", least=0
    )
    alarm_host_growth_mib: float = param(
        64.0, "alarm if a rank's host memory grows more a step", least=0
    )
    alarm_device_growth_mib: float = param(64.0, "the same of device memory", least=0)
    alarm_expert_imbalance: float = param(
        0.0, "alarm if an expert gets more than so many times the mean of its layer", least=0
    )
    alarm_unused_experts: float = param(
        0.5, "alarm if in a layer a larger share of experts gets no token", least=0
    )
    alarm_tokens_per_second: float = param(
        0.5, "alarm if rollout is slower than this share of the first steps' speed", least=0
    )

    # what was given of the algorithm: parts and their parameters, which they declare themselves
    parts: Mapping[str, Any] = field(default_factory=dict)

    # run directory and output
    run_dir: str | None = param(None, "where metrics, samples and checkpoints go")
    run_name: str = param(
        "run", "begins the name of the default run directory, runs/<name>-<date>-<time>.<n>"
    )
    num_logged_rollouts: int = param(8, "sampled texts per step in rollouts.jsonl", least=0)
    export_hf: str | None = param(None, "write the trained policy as a Hugging Face folder")
    export_dtype: str = param(
        "auto",
        "auto: that of --rl-hf-checkpoint, bfloat16 for its FP8 blocks; fp8: such blocks again, "
        "with the published bytes of each one that training left alone",
        choices=("auto", FLOAT8),
    )
    max_tokens_per_microbatch: int = param(
        0,
        "pack samples without padding into rows of at most this many tokens, balanced over ranks; "
        "0 pads --micro-batch-size samples to one length",
        least=0,
    )
    share_prompts: str = param(
        "auto",
        "compute a prompt once for its samples in a packed row; auto: where that changes nothing",
        choices=("auto", "on", "off"),
    )
    trace: int = param(
        0,
        "trace so many steps, after the first: files for ui.perfetto.dev and a table of where the "
        "time goes, in the run directory's trace/",
        least=0,
    )
    log_prob_chunk_tokens: int = param(1024, "tokens whose logits exist at one time", above=0)
    verify_out: str | None = param(None, "JSON file of mcore_rl.verify")

    @classmethod
    def of(cls, **values: Any) -> RLConfig:
        """The configuration of some flags, by names without --rl-, parts of the algorithm too."""
        own = {parameter.name for parameter in parameters_of(cls)}
        return cls(
            **{name: frozen(value) for name, value in values.items() if name in own},
            parts={name: value for name, value in values.items() if name not in own},
        )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> RLConfig:
        """The `--rl-*` part of a parsed namespace; a missing attribute is a bug and raises."""
        own = {p.name: getattr(args, f"rl_{p.name}") for p in parameters_of(cls)}
        # A file that the parser did not know of may have brought some since.
        parts = {name: getattr(args, f"rl_{name}", None) for name in flags().keys() - own.keys()}
        return cls.of(**own, **{k: v for k, v in parts.items() if v is not None})

    def as_dict(self) -> dict[str, Any]:
        """Every flag by name, parts of the algorithm as they were given or None."""
        values = {name: self.parts.get(name) for name in flags()}
        own = {p.name: getattr(self, p.name) for p in parameters_of(RLConfig)}
        return values | own | {"reward": self.rewards}

    @property
    def recipe(self) -> Algorithm:
        """The algorithm with the parts that were given; UsageError if they do not go together."""
        own = (parameter.name for parameter in parameters_of(RLConfig))
        asked = [name for name in own if name in ("top_p", "top_k") or name.startswith("critic_")]
        of_run = {name: getattr(self, name) for name in asked}
        given = {**self.parts, **{k: v for k, v in of_run.items() if v is not None}}
        return _recipe(self.algorithm, tuple(given.items()))

    @property
    def rewards(self) -> str:
        """The names of the rewards, with commas."""
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
        """Whether responses may go on in a later step than the one that began them."""
        return self.partial_rollouts and self.max_staleness != 0

    @property
    def keeps_kv(self) -> bool:
        """Whether keys and values outlive an update."""
        return self.keeps_unfinished and self.kv_after_update == "keep"

    @property
    def staleness_limit(self) -> int:
        """`max_staleness`, by default too."""
        return _MAX_STALENESS if self.max_staleness is None else self.max_staleness

    @property
    def groups_at_a_time(self) -> float:
        """`oversample`, by default too."""
        if self.oversample is not None:
            return self.oversample
        return _OVERSAMPLE_PARTIAL if self.keeps_unfinished else 1.0

    @property
    def directory(self) -> Path:
        """The run directory; before a run has its own what that would be called."""
        return Path(self.run_dir or f"runs/{self.run_name}-<date>-<time>.<n>")


def frozen(value: Any) -> Any:
    """What argparse collects in a list, as RLConfig holds it."""
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def _recipe(name: str, given: tuple[tuple[str, Any], ...]) -> Algorithm:
    from mcore_rl.algorithms.recipes import resolve_algorithm  # torch, which flags do without

    return resolve_algorithm(name, dict(given))


def flags() -> dict[str, Parameter]:
    """Every `--rl-*` flag but --rl-config, by name: the run's, then those that the algorithms'
    parts declare, a user's own among them. UsageError: a name that is declared twice."""
    from mcore_rl.algorithms.recipes import declared_parameters  # torch

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
    """Our flags of those that were given, by destination; the others at their defaults."""
    ours = {name: given[f"rl_{name}"] for name in flags() if f"rl_{name}" in given}
    return RLConfig.of(**ours)
