"""Megatron flags that need not be given: derived from the checkpoint and the machine.

There are three kinds, which differ in the effect of giving one of them:
- architecture, from config.json: a different value is an error that names both, unless the model
  does not depend on it;
- what Megatron needs if CUDA, Transformer Engine or Apex are missing, or its own defaults do not
  fit the model: likewise, since no other value works;
- defaults that suit RL: the user's value wins.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.batching.rows import chunks_of_sample, round_up
from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import Platform
from mcore_rl.config import RLConfig
from mcore_rl.flags.classes import check_derived_count
from mcore_rl.flags.inert_flags import restated, unread_by
from mcore_rl.flags.megatron_flags import ARCHITECTURE, WITHOUT_EFFECT_DESTS
from mcore_rl.flags.parsed_flags import FlagNames, given_values, without_flags
from mcore_rl.model.architecture_flags import megatron_flags
from mcore_rl.model.config_json import ModelShape

# Megatron's local layers, including `patches/megatron/local_layers.py`. They lack the default
# fusions of attention and norms. The fusion of rotation needs Transformer Engine, except for latent
# attention with YaRN, whose kernel does not support shared prompts.
_LOCAL_FLAGS = (
    "--transformer-impl local --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm"
).split()
# On by default. Transformer Engine's layers have it built in, but the output layer is always
# Megatron's own, and needs Apex's kernel for it.
_WITHOUT_APEX_FLAGS = ["--no-gradient-accumulation-fusion"]
CPU_FLAGS = [
    *"--distributed-backend gloo --use-cpu-initialization".split(),
    *_LOCAL_FLAGS,
    *_WITHOUT_APEX_FLAGS,
    *"--no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion".split(),
]


class _Any(Container[object]):
    """All values of a flag but those that leave it off."""

    def __contains__(self, value: object) -> bool:
        return bool(value)


# Values that pass Megatron's validation and fail when it starts, or when the model is built.
NEEDS_CUDA: Mapping[str, Container[object]] = {
    "cuda_graph_impl": ("local", "transformer_engine", "full_iteration"),
    "enable_cuda_graph": _Any(),
    "external_cuda_graph": _Any(),
    "init_model_with_meta_device": _Any(),
    "cpu_offloading_num_layers": _Any(),
    "high_priority_stream_groups": _Any(),
    "nccl_ub": _Any(),
    "pipeline_model_parallel_comm_backend": ("ucc",),
    "use_sharp": _Any(),
    "mamba_training_ssm_states_dtype": ("bf16", "fp32"),
    "moe_token_dispatcher_type": ("flex",),
}
# Flags that fail likewise, or have no effect, without Transformer Engine.
_NEEDS_TRANSFORMER_ENGINE = frozenset(
    """
    cpu_offloading_num_layers fp4 fp8 moe_grouped_gemm moe_permute_fusion moe_router_fusion
    te_rng_tracker use_fused_weighted_squared_relu use_grouped_gemm_for_shared_expert
    use_precision_aware_optimizer use_te_activation_func use_transformer_engine_op_fuser
    """.split()
)
# What a number N says of layer 0, 1, ...; a list of all layers may say the same.
FREQUENCIES: Mapping[str, Callable[[int, int], bool]] = {
    "moe_layer_freq": lambda layer, every: layer % every == 0,
    "linear_attention_freq": lambda layer, every: (layer + 1) % every != 0,
    "window_attn_skip_freq": lambda layer, every: (layer + 1) % every != 0,
}
# Their checkpointing drops the output, by a function that Megatron imports with Transformer Engine.
_RECOMPUTED_BY_TRANSFORMER_ENGINE = ("gdn_norm_out", "layernorm", "mla_up_proj", "moe_act")


@dataclass(frozen=True, slots=True)
class DerivedFlags:
    """Tokens to put before the user's, by kind, and the user's flags to leave out."""

    architecture: tuple[str, ...]
    machine: tuple[str, ...]
    defaults: tuple[str, ...]
    unread: frozenset[str] = frozenset()  # destinations: given, and not used by this model

    @property
    def tokens(self) -> list[str]:
        return [*self.architecture, *self.machine, *self.defaults]


def derive_flags(
    shape: ModelShape,
    config: RLConfig,
    given: Mapping[str, Any],
    *,
    parser: argparse.ArgumentParser,
    platform: Platform,
) -> DerivedFlags:
    """Return the flags that `given` (dest -> value, from the user) leaves to be derived.

    `parser` is Megatron's with ours and is used as by `given_values`. Raises UsageError if the user
    contradicts config.json, the machine, or `--rl-precision`.
    """
    architecture = megatron_flags(shape)
    machine = machine_flags(shape, platform)
    names = FlagNames(parser)
    _refuse_what_megatron_lacks(shape, names)
    wanted = given_values(architecture, parser)
    unread = frozenset(
        dest
        for dest in unread_by(shape, given)
        if dest not in wanted or not _equal(dest, given[dest], wanted[dest])
    )
    again = restated(shape, given)
    _refuse_contradictions(wanted | again, effective_of(given, unread), names, "config.json")
    unread |= again.keys()
    given = effective_of(given, unread)
    for dest in [d for d in given if d in ARCHITECTURE and d not in wanted]:
        if given[dest] != parser.get_default(dest):  # scripts often spell out defaults
            raise UsageError(
                "contradicts config.json, which has no such part",
                flag=names.shown(dest, given[dest]),
                remedy="drop the flag",
            )
    for source, tokens in machine.items():
        _refuse_contradictions(given_values(tokens, parser), given, names, source)
    _refuse_other_precision(config, given)
    if given.get("moe_grouped_gemm") and config.trainer.no_moe_grouped_gemm:
        raise UsageError(
            "contradicts --rl-no-moe-grouped-gemm", flag="--moe-grouped-gemm", remedy="drop one"
        )
    if given.get("moe_router_fusion") and shape.experts and shape.experts.ranks_groups_by_best:
        raise UsageError(
            "ranks a group of experts by the sum of several, but config.json (topk_method "
            "'group_limited_greedy') by its best one",
            flag="--moe-router-fusion",
            remedy="drop the flag",
        )
    _refuse_what_is_not_here(given, names, platform)
    _refuse_what_sinks_lack(shape, given, platform)
    _refuse_what_indexers_lack(shape, given)
    tokens = _defaults(shape, config, given, platform, has_detached_mtp="mtp_detach_heads" in names)
    defaults = given_values(tokens, parser)
    check_derived_count(given, defaults)
    kept = {dest: value for dest, value in defaults.items() if dest not in given}
    on_machine = [token for tokens in machine.values() for token in tokens]
    as_tokens = tuple(_as_tokens(kept, names))
    return DerivedFlags(tuple(architecture), tuple(on_machine), as_tokens, unread)


def _refuse_what_megatron_lacks(shape: ModelShape, names: FlagNames) -> None:
    """Refuse parts of a model that came with 0.19; each shows by a flag that came then, too."""
    yarn = shape.rope["rope_type"] == "yarn" and not shape.latent
    for part, is_there, dest in (
        ("yarn of grouped attention", yarn, "yarn_beta_fast"),
        ("sparse attention", shape.indexer, "dsa_indexer_k_norm_epsilon"),
        ("gated delta nets", shape.delta_net, "dsa_indexer_k_norm_epsilon"),
        ("Mamba-2 layers", shape.mamba, "mamba_training_ssm_states_dtype"),
    ):
        if is_there and dest not in names:
            raise UsageError(
                f"describes {shape.architecture}'s {part}, which this Megatron lacks",
                flag="config.json",
                remedy="install megatron-core 0.19 or newer",
            )


def effective_of(given: Mapping[str, Any], unread: Collection[str]) -> dict[str, Any]:
    """Return the flags of `given`, by destination, that have an effect."""
    without = WITHOUT_EFFECT_DESTS.union(unread)
    return {dest: value for dest, value in given.items() if dest not in without}


def values_of(
    derived: DerivedFlags, given: Mapping[str, Any], parser: argparse.ArgumentParser
) -> dict[str, Any]:
    """Return the derived flags and those of `given` that have an effect, by destination."""
    return {**given_values(derived.tokens, parser), **effective_of(given, derived.unread)}


def with_effect(
    derived: DerivedFlags, tokens: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[str, ...]:
    """Return the user's tokens without the flags that have no effect."""
    return without_flags(tokens, parser, WITHOUT_EFFECT_DESTS | derived.unread)


def machine_flags(shape: ModelShape, platform: Platform) -> dict[str, list[str]]:
    """Return the flags that Megatron needs here, by reason (in words)."""
    if not platform.cuda:
        return {"a machine without CUDA": CPU_FLAGS}
    flags = {}
    if platform.transformer_engine is None:
        flags["a machine without Transformer Engine"] = _LOCAL_FLAGS
    elif shape.indexer:
        flags["sparse attention"] = ["--no-rope-fusion"]
    elif shape.latent and shape.rope["rope_type"] != "yarn":
        flags["latent attention without YaRN"] = ["--no-rope-fusion"]
    if shape.experts and shape.linear_biases and platform.transformer_engine is not None:
        flags["a grouped layer of experts with biases"] = ["--no-bias-dropout-fusion"]
    if not platform.fused_weight_gradients:
        flags["a machine without Apex's fused weight gradients"] = _WITHOUT_APEX_FLAGS
    return flags


def check_fits_machine(
    args: argparse.Namespace,
    shape: ModelShape,
    given: Mapping[str, Any],
    *,
    parser: argparse.ArgumentParser,
    platform: Platform,
) -> None:
    """Check the arguments that a fork has parsed, of which `given` differ from the defaults.

    Raises UsageError if one needs what is missing here, or, with CUDA, if one of `machine_flags` is
    missing: layers would raise when they are built, much later.
    """
    _refuse_what_is_not_here(given, FlagNames(parser), platform)
    _refuse_what_sinks_lack(shape, given, platform)
    _refuse_what_indexers_lack(shape, given)
    for source, tokens in machine_flags(shape, platform).items() if platform.cuda else ():
        for dest, value in given_values(tokens, parser).items():
            if getattr(args, dest) != value:
                raise UsageError(
                    f"the parsed {dest} is {getattr(args, dest)}, but {source} needs "
                    f"{' '.join(tokens)}",
                    remedy="pass that, or start by mcore_rl.initialize, which derives it",
                )


def _refuse_what_is_not_here(
    given: Mapping[str, Any], names: FlagNames, platform: Platform
) -> None:
    """Refuse flags whose kernels or layers are not available on this machine."""
    if not platform.cuda:
        for dest in [dest for dest in given if given[dest] in NEEDS_CUDA.get(dest, ())]:
            raise UsageError(
                "needs CUDA, which this machine lacks",
                flag=names.shown(dest, given[dest]),
                remedy="drop it",
            )
    if given.get("optimizer", "adam") not in ("adam", "sgd") and not platform.emerging_optimizers:
        raise UsageError(
            "needs the package emerging-optimizers, which cannot be imported here",
            flag=names.shown("optimizer", given["optimizer"]),
            remedy="install it, or give --optimizer adam",
        )
    if platform.transformer_engine is not None:
        if given.get("transformer_impl") == "local":
            raise UsageError(
                "lacks layers that mcore_rl completes only where Transformer Engine cannot be "
                "imported, and here it can",
                flag="--transformer-impl local",
                remedy="drop the flag",
            )
        return
    for dest in [dest for dest in given if given[dest] and dest in _NEEDS_TRANSFORMER_ENGINE]:
        raise UsageError(
            "needs Transformer Engine, which cannot be imported here",
            flag=names.shown(dest, given[dest]),
            remedy="drop it",
        )
    for module in given.get("recompute_modules") or ():
        if module in _RECOMPUTED_BY_TRANSFORMER_ENGINE:
            raise UsageError(
                "needs Transformer Engine, which cannot be imported here",
                flag=f"--recompute-modules {module}",
                remedy="drop it, or use --recompute-granularity full",
            )


def _refuse_what_sinks_lack(
    shape: ModelShape, given: Mapping[str, Any], platform: Platform
) -> None:
    """Refuse attention that Transformer Engine has no kernel for, before the first batch fails."""
    cp_size = given.get("context_parallel_size") or 1
    has_kernel = platform.transformer_engine is None or given.get("cp_comm_type") == ["a2a"]
    if shape.attention_sinks and cp_size > 1 and not has_kernel:
        raise UsageError(
            "needs --cp-comm-type a2a with attention sinks, of which Transformer Engine has no "
            "other context parallelism",
            flag=f"--context-parallel-size {cp_size}",
            remedy="add that, or drop the flag",
        )


def _refuse_what_indexers_lack(shape: ModelShape, given: Mapping[str, Any]) -> None:
    """Refuse what Megatron's sparse attention does not support."""
    if shape.indexer is None:
        return
    kinds = given.get("cp_comm_type", ["allgather"])
    if given.get("context_parallel_size", 1) > 1 and any(
        kind.replace("_", "") != "allgather" for kind in kinds
    ):
        raise UsageError(
            "is not a way in which sparse attention exchanges keys: Megatron only gathers them",
            flag=f"--cp-comm-type {' '.join(kinds)}",
            remedy="drop the flag, it is derived",
        )


def _refuse_contradictions(
    wanted: Mapping[str, Any], given: Mapping[str, Any], names: FlagNames, source: str
) -> None:
    for dest, value in given.items():
        if dest in wanted and not _equal(dest, value, wanted[dest]):
            needed = names.shown(dest, wanted[dest])
            raise UsageError(
                f"contradicts {source}, which needs {needed}",
                flag=names.shown(dest, value),
                remedy="drop the flag, it is derived",
            )


def _equal(dest: str, value: Any, wanted: Any) -> bool:
    if dest in FREQUENCIES and isinstance(value, list) != isinstance(wanted, list):
        short, layers = (wanted, value) if isinstance(value, list) else (value, wanted)
        is_marked = FREQUENCIES[dest]
        return short > 0 and layers == [is_marked(n, short) for n in range(len(layers))]
    return bool(value == wanted)


def _refuse_other_precision(config: RLConfig, given: Mapping[str, Any]) -> None:
    """Refuse other dtypes than --rl-precision, which the engine's dtype follows."""
    for dest in ("bf16", "fp16"):
        if dest in given and given[dest] != (config.trainer.precision == dest):
            flag, other = (f"--{dest}", dest) if given[dest] else (f"--no-{dest}", "fp32")
            raise UsageError(
                f"contradicts --rl-precision {config.trainer.precision}",
                flag=flag,
                remedy=f"drop {flag} or give --rl-precision {other}",
            )


def _defaults(
    shape: ModelShape,
    config: RLConfig,
    given: Mapping[str, Any],
    platform: Platform,
    *,
    has_detached_mtp: bool,
) -> list[str]:
    """Return defaults for RL, and values that Megatron requires; `has_detached_mtp`: this Megatron
    can keep the gradients of MTP layers from the policy."""
    mini_batch = config.samples_per_step // config.trainer.num_mini_batches
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    chunks = chunks_of_sample(given.get("context_parallel_size") or 1)
    tokens = [
        *("--tokenizer-type", "NullTokenizer"),
        *("--micro-batch-size", "1"),
        *("--global-batch-size", str(mini_batch)),
        *("--seq-length", str(round_up(longest, chunks))),
        *("--train-iters", str(config.num_updates(of_critic=shape.value_head))),
        *("--lr", "1e-6"),
        *("--lr-decay-style", "constant"),
        *("--clip-grad", "1.0"),
        *("--weight-decay", "0.0"),
        *("--adam-beta2", "0.95"),
        *("--attention-dropout", "0.0"),
        *("--hidden-dropout", "0.0"),
        *("--make-vocab-size-divisible-by", str(_vocabulary_multiple(given))),
        *("--ckpt-format", "fsdp_dtensor" if given.get("use_megatron_fsdp") else "torch_dist"),
        *("--distributed-timeout-minutes", str(_patience_minutes(config))),
        "--no-create-attention-mask-in-dataloader",
        "--use-distributed-optimizer",
    ]
    if not given.get("use_megatron_fsdp"):  # else the format is reshardable already
        # A run resumes in any layout; otherwise the optimizer is bound to its TP and PP. Memory is
        # not a reason against it: mcore_rl.patches.megatron.optimizer_in_pieces.
        tokens.append("--dist-ckpt-optim-fully-reshardable")
    if given.get("pad_vocab_size") is False:  # Megatron leaves the number to its own builder
        tokens += ["--padded-vocab-size", str(shape.vocab_size)]
    if config.lora.rank:
        # Megatron's kernels would add gradients to weights that are not parameters.
        tokens.append("--no-gradient-accumulation-fusion")
    if given.get("mtp_num_layers") and has_detached_mtp:
        # Their training affects neither the policy's gradients nor its clipping.
        tokens.append("--mtp-detach-heads")
    if given.get("save"):
        # Megatron asks for one that divides the other; without one given, saves go by time.
        interval = given.get("save_retain_interval") or config.trainer.num_steps
        tokens += ["--save-interval", str(interval)]
    if config.trainer.precision != "fp32":
        tokens.append(f"--{config.trainer.precision}")
    if not given.get("use_checkpoint_opt_param_scheduler"):
        # A resumed run has more steps than the checkpoint's schedule; use the command line's.
        tokens.append("--override-opt_param-scheduler")
    if given.get("tensor_model_parallel_size", 1) > 1:
        # MoE with TP needs it, and dense models lose nothing.
        tokens.append("--sequence-parallel")
    if shape.indexer and given.get("context_parallel_size", 1) > 1:
        tokens += ["--cp-comm-type", "allgather"]
    if shape.experts:
        tokens += [
            *("--moe-token-dispatcher-type", "alltoall"),
            *("--moe-router-dtype", "fp32"),
            *("--expert-tensor-parallel-size", "1"),
            # Balancing belongs to pre-training: it would change the policy without a reward for it.
            *("--moe-router-load-balancing-type", "none"),
        ]
        if shape.experts.has_bias:
            tokens += ["--moe-router-bias-update-rate", "0.0"]
        if platform.transformer_engine is not None and not config.trainer.no_moe_grouped_gemm:
            tokens.append("--moe-grouped-gemm")  # else one matrix product per expert
        if given.get("moe_flex_dispatcher_backend") == "hybridep":
            tokens.append("--moe-hybridep-pad-uneven-dispatch-inputs")  # else they must be even
    return tokens


def _patience_minutes(config: RLConfig) -> int:
    """Return how long a rank waits for another: one engine may sample longer than another, and the
    watchdog should end a run first, since it reports the stuck rank and its stage."""
    if not config.run.stage_timeout_seconds:
        return 7 * 24 * 60
    return math.ceil(config.run.stage_timeout_seconds / 60) + 10


def _vocabulary_multiple(given: Mapping[str, Any]) -> int:
    """Return the flag's value that pads the vocabulary as in vLLM, to a multiple of 64, so that
    both shard it at the same rows. Megatron multiplies the value by the TP size."""
    return 64 // math.gcd(64, given.get("tensor_model_parallel_size", 1))


def _as_tokens(values: Mapping[str, Any], names: FlagNames) -> list[str]:
    tokens: list[str] = []
    for dest, value in values.items():
        if isinstance(value, bool):
            tokens.append(names[dest])
            continue
        tokens += [names[dest], *(str(v) for v in (value if isinstance(value, list) else [value]))]
    return tokens
