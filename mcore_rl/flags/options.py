"""The `--rl-*` flags, and how they join Megatron's own arguments (`given_flags`: what is given).

Every field of `RLConfig` is one flag: `prompts_per_step` is `--rl-prompts-per-step`... with the
dataclass as the only place that knows names, types, defaults and help. Megatron's flags keep their
meaning; those that a checkpoint's config.json decides are derived from it, and one that is given
and contradicts it is an error. Precedence: the command line, then `--rl-config` (the later file
first), then what is derived.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.common.errors import UsageError

if TYPE_CHECKING:
    from mcore_rl.algorithms.recipes import Algorithm


def _flag(
    default: Any, help: str, *, choices: Sequence[str] | None = None, kind: type | None = None
):
    metadata = {"help": help, "choices": choices, "kind": kind or type(default)}
    return field(default=default, metadata=metadata)


def _several(help: str):
    """A flag that may be given again, each time with one value or more; none of them is lost."""
    metadata = {"help": help, "choices": None, "kind": str, "several": True}
    return field(default=(), metadata=metadata)


def _part(kind: type, help: str, *, choices: Sequence[str] | None = None):
    """A part of the algorithm; unless it is given it is the recipe's."""
    metadata = {"help": help, "choices": choices, "kind": kind, "part": True}
    return field(default=None, metadata=metadata)


@dataclass(frozen=True, slots=True)
class RLConfig:
    """Everything mcore_rl is told beyond Megatron's own arguments. One field, one flag."""

    # checkpoint, prompts, reward
    hf_checkpoint: str | None = _flag(
        None, "Hugging Face checkpoint folder to start from", kind=str
    )
    prompts: str | None = _flag(None, "JSONL or Parquet file of training prompts", kind=str)
    eval_prompts: str | None = _flag(None, "JSONL or Parquet file of held-out prompts", kind=str)
    prompt_column: str = _flag("prompt", "column that holds the prompt (text or chat messages)")
    answer_column: str = _flag("answer", "column that holds what the reward compares with")
    no_chat_template: bool = _flag(False, "give prompts to the model as they stand in the file")
    max_prompt_tokens: int = _flag(512, "longer prompts are dropped, and counted")
    max_response_tokens: int = _flag(512, "generation stops after this many tokens")
    cache_dir: str | None = _flag(None, "folder for tokenised prompts", kind=str)
    reward: str = _flag(
        "exact_match",
        "exact_match, arithmetic, gsm8k, http, pooling, model, package.module:function or one of "
        "--rl-import; several with commas",
    )
    reward_weights: str | None = _flag(
        None,
        "a weight for each reward, with commas; default 1 (a negative first one needs a =: "
        "--rl-reward-weights=-1,1)",
        kind=str,
    )
    reward_workers: int = _flag(1, "reward processes per engine")
    reward_timeout_seconds: float = _flag(10.0, "a sample whose reward takes longer is left out")
    reward_memory_gib: float = _flag(
        4.0,
        "memory of a reward process, in GiB; a sample that needs more is left out; 0: no limit",
    )
    reward_env: str | None = _flag(
        None,
        "environment variables that reward processes get, with commas; they see no others but PATH "
        "and the like (docs/using/security.md)",
        kind=str,
    )
    reward_url: str | None = _flag(
        None, "endpoint of reward http (docs/using/rewards.md)", kind=str
    )
    reward_http_batch: int = _flag(16, "samples per request to it")
    reward_http_concurrency: int = _flag(8, "requests at a time, per scoring rank")
    reward_http_retries: int = _flag(3, "further attempts after timeouts, 429 and 5xx")
    reward_http_header_env: str | None = _flag(
        None, "environment variable that holds a header for it, 'Name: value'", kind=str
    )
    reward_pooling_url: str | None = _flag(
        None, "a vLLM server with a reward model, for reward pooling", kind=str
    )
    reward_pooling_header_env: str | None = _flag(
        None, "environment variable that holds a header for that server", kind=str
    )
    reward_model: str | None = _flag(
        None, "Hugging Face folder with a score head, for reward model, run by Megatron", kind=str
    )
    reward_tp_size: int | None = _flag(None, "TP of the model; default: the actor's", kind=int)
    reward_pp_size: int | None = _flag(None, "PP of the model; default: the actor's", kind=int)
    reward_ep_size: int | None = _flag(None, "EP of the model; default: the actor's", kind=int)
    reward_ranks: str | None = _flag(None, "ranks of the model's own, like 6-7", kind=str)

    precision: str = _flag("bf16", "of parameters in training", choices=("bf16", "fp16", "fp32"))
    no_moe_grouped_gemm: bool = _flag(
        False,
        "each expert its own layers, where Transformer Engine would compute all of them together",
    )

    # algorithm
    algorithm: str = _flag(
        "grpo",
        "the recipe: ppo, grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, remax, opo, "
        "dapo, gspo, cispo, gmpo or sapo; the flags up to --rl-mismatch-high replace parts of it",
    )
    import_: tuple[str, ...] = _several(
        "your own .py file of estimators, losses or rewards, each with its decorator; several may "
        "be given",
    )
    num_steps: int = _flag(100, "rollout-and-update steps")
    num_prompts_per_step: int = _flag(16, "prompts drawn per step")
    num_samples_per_prompt: int | None = _part(int, "responses sampled per prompt, a group")
    num_mini_batches: int = _flag(1, "parts of a step's samples, one optimizer update each")
    num_epochs: int = _flag(1, "how often a step's samples are learnt from")
    temperature: float = _flag(1.0, "sampling temperature; log-probs are of the tempered policy")
    top_p: float | None = _part(float, "sample from the likeliest tokens of this mass")
    top_k: int | None = _part(int, "sample from so many likeliest tokens; 0: from all")
    advantage: str | None = _part(
        str,
        "estimator: gae, grpo, dr_grpo, rloo, opo, remax, reinforce_pp, reinforce_pp_baseline, or "
        "one of --rl-import",
    )
    policy_loss: str | None = _part(
        str, "ppo_clip, gspo, cispo, gmpo, sapo, policy_gradient, or one of --rl-import"
    )
    loss_aggregation: str | None = _part(
        str,
        "how losses of tokens become one: the mean of all, or per sequence and then over these",
        choices=("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"),
    )
    loss_constant: float | None = _part(
        float, "tokens to divide by, of aggregation constant; default --rl-max-response-tokens"
    )
    clip_eps_lower: float | None = _part(float, "lower clip range of the probability ratio")
    clip_eps_upper: float | None = _part(float, "upper clip range; a larger one is clip-higher")
    dual_clip: float | None = _part(float, "bound on ratios where the advantage is negative")
    sapo_temperature_positive: float | None = _part(float, "of SAPO's gate, for good tokens")
    sapo_temperature_negative: float | None = _part(float, "and for bad ones")
    kl_coef: float | None = _part(float, "weight of the KL to the reference policy in the loss")
    kl_in_reward: bool | None = _part(bool, "take that KL from the reward, token by token")
    kl_reward_coef: float | None = _part(float, "its weight there")
    kl_target: float | None = _part(
        float, "nats per token that the weight in the reward is adapted to (arXiv 1909.08593)"
    )
    kl_horizon: float | None = _part(float, "samples over which it is adapted")
    kl_estimator: str | None = _part(str, "estimator of the KL", choices=("k1", "k2", "k3"))
    entropy_coef: float | None = _part(float, "weight of the entropy bonus in the loss")
    gamma: float | None = _part(float, "what a reward one token later is worth")
    gae_lambda: float | None = _part(float, "of GAE: 0 trusts the critic, 1 the rewards alone")
    whiten_advantages: bool | None = _part(bool, "to mean 0 and deviation 1 over all tokens")
    value_clip_eps: float | None = _part(float, "how far a value counts from what it was; or inf")
    dynamic_sampling: bool | None = _part(
        bool, "draw prompts again whose responses all have the same reward (arXiv 2503.14476)"
    )
    max_refills: int | None = _part(int, "how often a step may draw again")
    overlong_buffer_tokens: int | None = _part(
        int, "last tokens of the response budget over which a penalty of up to 1 grows"
    )
    critic_init: str | None = _part(
        str, "Hugging Face folder of the critic, a reward model's say; default: the actor's"
    )
    critic_lr: float | None = _part(float, "learning rate of the critic; default: --lr")
    critic_clip_grad: float | None = _part(float, "gradient norm; default: --clip-grad")
    critic_warmup_steps: int | None = _part(int, "steps at first that train the critic alone")
    critic_tp_size: int | None = _part(int, "TP of the critic; default: the actor's")
    critic_pp_size: int | None = _part(int, "PP of the critic; default: the actor's")
    critic_ep_size: int | None = _part(int, "EP of the critic; default: the actor's")
    critic_ranks: str | None = _part(
        str, "ranks of the critic's own, like 4-7, which train while the actor's do"
    )
    mismatch_correction: str | None = _part(
        str,
        "of engine against trainer: weights per token or sequence, or what is left out",
        choices=(
            *("none", "token_tis", "sequence_tis", "icepop"),
            *("geometric_rejection", "product_rejection"),
        ),
    )
    mismatch_cap: float | None = _part(float, "largest weight of the two that truncate")
    mismatch_low: float | None = _part(float, "least ratio that the others keep")
    mismatch_high: float | None = _part(float, "and the largest")
    reference_refresh_interval: int = _flag(
        0, "steps from one renewal of the reference policy to the next; 0 keeps the first"
    )
    on_nonfinite_grad: str = _flag(
        "stop", "what a non-finite gradient does to the run", choices=("stop", "skip")
    )
    load_or_start: bool = _flag(
        False, "begin where nothing is saved in --load yet, as a job that is started again needs it"
    )
    on_changed_prompts: str = _flag(
        "stop",
        "what --load does if --rl-prompts are others than the checkpoint's; restart begins with "
        "the first of them",
        choices=("stop", "restart"),
    )

    # evaluation
    eval_interval: int = _flag(20, "steps between evaluations; 0 evaluates never")
    num_eval_prompts: int = _flag(128, "held-out prompts per evaluation")
    eval_temperature: float = _flag(0.0, "0 is greedy")

    # rollout engine and hand-over
    rollout_tp_size: int = _flag(
        0, "TP size of a vLLM engine; 0 takes --tensor-model-parallel-size"
    )
    rollout_ep_size: int = _flag(
        0,
        "EP size of a vLLM engine: TP size x its data-parallel ranks; 0 keeps "
        "--expert-model-parallel-size where the engine can, and else takes the TP size",
    )
    rollout_no_expert_parallel: bool = _flag(False, "split experts over TP instead of keeping EP")
    rollout_all2all_backend: str = _flag(
        "", "vLLM's all-to-all backend where experts span data-parallel ranks; empty: its default"
    )
    rollout_max_num_seqs: int = _flag(128, "sequences in flight per engine")
    rollout_kv_cache_gib: float = _flag(1.0, "KV cache per CPU rank")
    rollout_gpu_memory_utilization: float = _flag(0.5, "share of a GPU that vLLM may take")
    rollout_enforce_eager: bool = _flag(False, "no CUDA graphs in vLLM (always so on CPU)")
    ranks_per_node: int = _flag(
        0, "processes on one machine, which engines' TP groups do not leave; 0 asks the launcher"
    )
    reshard_bucket_mb: int = _flag(512, "bytes in flight during a hand-over, in MiB")
    offload: str = _flag(
        "auto",
        "what training keeps in host memory during rollout: gradients (or grads), optimizer, "
        "parameters (or params), with commas; none; or auto: gradients and optimizer with a GPU. "
        "Without one copies lie in the same memory and save nothing",
    )
    offload_keep_gradients: bool = _flag(
        False, "copy gradients when they are offloaded, instead of zeroing them afterwards"
    )
    reshard_dtype: str = _flag(
        "checkpoint",
        "dtype in which weights travel, a cast at the source; checkpoint: fp16 with --rl-precision "
        "fp16, else that of the checkpoint",
        choices=("checkpoint", "bf16", "fp16"),
    )
    reshard_delta: bool = _flag(False, "send only blocks that changed since the last hand-over")
    reshard_full_interval: int = _flag(
        20, "with --rl-reshard-delta, hand-overs from one full transfer to the next"
    )

    attest: str = _flag(
        "sample",
        "how much of a hand-over is proved to have arrived: every element, one row of 32 (other "
        "rows each time), or nothing",
        choices=("full", "sample", "off"),
    )
    canary_interval: int = _flag(
        50, "hand-overs from one comparison of both sides' log-probs to the next; 0 compares never"
    )
    canary_tolerance: float = _flag(
        0.3,
        "how far these may be apart: the mean |difference| over a prompt's tokens, in nats, beyond "
        "which the hand-over is repeated and then the run stops; 0 compares and never stops",
    )

    stage_timeout_seconds: float = _flag(
        3600.0, "a stage that takes longer ends the run, and says what each rank does; 0 waits"
    )

    # health; a threshold of 0 switches its alarm off
    on_alarm: str = _flag(
        "warn",
        "what an alarm does: a warning, or a checkpoint and the end of the run (exit code 75)",
        choices=("warn", "stop"),
    )
    alarm_window: int = _flag(10, "steps that an alarm looks at")
    alarm_reward_std: float = _flag(1e-3, "alarm if the standard deviation of rewards is lower")
    alarm_kl: float = _flag(1.0, "alarm if the KL to the reference is higher")
    alarm_entropy: float = _flag(0.1, "alarm if the entropy is below this share of the first")
    alarm_response_tokens: float = _flag(
        3.0, "alarm if responses get longer or shorter by more than this factor"
    )
    alarm_clip_fraction: float = _flag(0.5, "alarm if a larger share of tokens is clipped")
    alarm_mismatch: float = _flag(0.1, "alarm if kl/rollout_actor is higher")
    alarm_grad_norm: float = _flag(
        10.0, "alarm if the gradient norm is so many times the median of the last steps"
    )
    alarm_host_growth_mib: float = _flag(64.0, "alarm if a rank's host memory grows more a step")
    alarm_device_growth_mib: float = _flag(64.0, "the same of device memory")
    alarm_expert_imbalance: float = _flag(
        0.0, "alarm if an expert gets more than so many times the mean of its layer"
    )
    alarm_tokens_per_second: float = _flag(
        0.5, "alarm if rollout is slower than this share of the first steps' speed"
    )

    # run directory and output
    run_dir: str | None = _flag(None, "where metrics, samples and checkpoints go", kind=str)
    run_name: str = _flag(
        "run", "begins the name of the default run directory, runs/<name>-<date>-<time>.<n>"
    )
    num_logged_rollouts: int = _flag(8, "sampled texts per step in rollouts.jsonl")
    export_hf: str | None = _flag(
        None, "write the trained policy as a Hugging Face folder", kind=str
    )
    max_tokens_per_microbatch: int = _flag(
        0,
        "pack samples without padding into rows of at most this many tokens, balanced over ranks; "
        "0 pads --micro-batch-size samples to one length",
    )
    share_prompts: str = _flag(
        "auto",
        "compute a prompt once for its samples in a packed row; auto: where that changes nothing",
        choices=("auto", "on", "off"),
    )
    trace: int = _flag(
        0,
        "trace so many steps, after the first: files for ui.perfetto.dev and a table of where the "
        "time goes, in the run directory's trace/",
    )
    log_prob_chunk_tokens: int = _flag(1024, "tokens whose logits exist at one time")
    verify_out: str | None = _flag(None, "JSON file of mcore_rl.verify", kind=str)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> RLConfig:
        """The `--rl-*` part of a parsed namespace; a missing attribute is a bug and raises."""
        values = {f.name: getattr(args, f"rl_{f.name}") for f in dataclasses.fields(cls)}
        return cls(**{name: frozen(value) for name, value in values.items()})

    @property
    def recipe(self) -> Algorithm:
        """The algorithm with the parts that were given; UsageError if they do not go together."""
        parts = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if "part" in f.metadata
        }
        given = tuple((name, value) for name, value in parts.items() if value is not None)
        return _recipe(self.algorithm, given)

    @property
    def samples_per_prompt(self) -> int:
        return self.recipe.num_samples_per_prompt

    @property
    def samples_per_step(self) -> int:
        return self.num_prompts_per_step * self.samples_per_prompt

    @property
    def directory(self) -> Path:
        """The run directory; before a run has its own (see `startup`) what that would be called."""
        if self.run_dir:
            return Path(self.run_dir)
        return Path("runs") / f"{self.run_name}-<date>-<time>.<n>"


def frozen(value: Any) -> Any:
    """What argparse collects in a list, as RLConfig holds it."""
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def _recipe(name: str, given: tuple[tuple[str, Any], ...]) -> Algorithm:
    from mcore_rl.algorithms.recipes import resolve_algorithm  # torch, which flags do without

    return resolve_algorithm(name, dict(given))


# Degrees in which a critic or a reward model may differ from the actor, and Megatron's flags.
DEGREE_FLAGS = {
    "tp_size": "--tensor-model-parallel-size",
    "pp_size": "--pipeline-model-parallel-size",
    "ep_size": "--expert-model-parallel-size",
}


def flag_of(field_name: str) -> str:
    """num_steps -> --rl-num-steps; import_, which is no name in Python, -> --rl-import."""
    return "--rl-" + field_name.rstrip("_").replace("_", "-")


GROUP = "mcore_rl"  # the title that our flags stand under in a parser
ExtraArgs = Callable[[argparse.ArgumentParser], Any]  # Megatron's `extra_args_provider`


def add_rl_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--rl-*` flags to a parser, Megatron's or a fork's; returns the parser.

    Raises UsageError if the parser already defines one of our flags: two meanings of one flag would
    be worse than stopping. Names that Megatron uses for its own RL are avoided.
    """
    taken = parser._option_string_actions
    group = parser.add_argument_group(title=GROUP)
    for spec in dataclasses.fields(RLConfig):
        flag = flag_of(spec.name)
        if flag in taken:
            raise UsageError(
                f"{flag} is already defined by this parser (as '{taken[flag].dest}') and mcore_rl "
                "needs the name; rename the other one"
            )
        kind = spec.metadata["kind"]
        options: dict[str, Any] = {"dest": f"rl_{spec.name}", "help": spec.metadata["help"]}
        if kind is bool and spec.default is None:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif kind is bool:
            group.add_argument(flag, action="store_true", **options)
        elif "several" in spec.metadata:
            group.add_argument(flag, action="extend", nargs="+", type=kind, default=[], **options)
        else:
            group.add_argument(
                flag, type=kind, default=spec.default, choices=spec.metadata["choices"], **options
            )
    group.add_argument(
        "--rl-config",
        dest="rl_config",
        default=None,
        help="YAML file of flags; given several times, the later file wins, key by key",
    )
    return parser


def with_rl_args(extra_args: ExtraArgs | None) -> ExtraArgs:
    """What adds a fork's flags to Megatron's parser, and ours unless the fork has added them."""

    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = parser if extra_args is None else extra_args(parser) or parser
        has_ours = any(group.title == GROUP for group in parser._action_groups)
        return parser if has_ours else add_rl_args(parser)

    return add
