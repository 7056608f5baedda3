"""Checks of what a job asks of its vLLM engines: versions, CUDA graphs, FP8 blocks.

Each raises UsageError. They read flags and files only; `resolver` has the list of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mcore_rl.common.allocator import vllm_offloads_graphs
from mcore_rl.common.errors import UsageError, as_flag
from mcore_rl.common.vllm_version import (
    FLOAT8_BLOCKS,
    FLOAT32_HEAD,
    LORA_LAYERS,
    ROUTED_EXPERTS,
    require_capability,
)
from mcore_rl.config import RLConfig
from mcore_rl.hybrid_engine.options import EngineOptions
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.families import family_of
from mcore_rl.model.float8_blocks import BLOCK, float8_weights
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.model.lora import ADAPTERS, MERGED
from mcore_rl.model.roles import REWARD, ROLLOUT, Roles
from mcore_rl.model.speculation import check_drafter, check_drafter_weights, parse_speculation
from mcore_rl.moe.routing import R3


def check_engine(config: RLConfig, shape: ModelShape, *, cuda: bool) -> None:
    """Check that the installed vLLM has what the model and the flags need of it."""
    replay = config.trainer.routing_replay
    if replay == R3 and shape.experts is not None:
        flag, remedy = f"--rl-routing-replay {replay}", "give r2 or off"
        require_capability(ROUTED_EXPERTS, cuda=cuda, flag=flag, remedy=remedy)
    if config.lora.rollout == ADAPTERS:
        flag, remedy = f"--rl-lora-rollout {ADAPTERS}", f"give --rl-lora-rollout {MERGED}"
        require_capability(LORA_LAYERS, cuda=cuda, flag=flag, remedy=remedy)
    if config.trainer.fp32_lm_head:
        require_capability(FLOAT32_HEAD, cuda=cuda, flag="--rl-fp32-lm-head", remedy="drop it")


def check_speculation(config: RLConfig, shape: ModelShape, checkpoint: HFCheckpoint | None) -> None:
    """Check that a drafter exists, and that the checkpoint, if read, has its weights."""
    speculation = parse_speculation(config.engine.speculate)
    check_drafter(speculation, shape)
    if checkpoint is not None:
        held = {name: info.shape for name, info in checkpoint.mtp.items()}
        check_drafter_weights(speculation, shape, held, str(checkpoint.folder))


def check_candidates(config: RLConfig, shape: ModelShape) -> None:
    """Check that the vocabulary has the most probable tokens that are asked for."""
    if (num_top := config.recipe.score_centering) > shape.vocab_size:
        raise UsageError(
            f"is more than the vocabulary of {shape.vocab_size}",
            flag=f"--rl-score-centering {num_top}",
            remedy="choose for example 128",
        )


def check_layers(shape: ModelShape, *, cuda: bool) -> None:
    """Check that engines can compute the model's layers on this machine."""
    if not cuda and (what := shape.needs_gpu):
        raise UsageError(
            f"is a {shape.architecture} checkpoint, whose {what} vLLM runs on GPUs only",
            flag="--rl-hf-checkpoint",
            remedy="use a machine with CUDA; mcore-rl plan and mcore_rl.verify "
            "--rl-verify-megatron-only work here",
        )


def check_separate(config: RLConfig, roles: Roles) -> None:
    """Check flags that engines on ranks of their own leave without effect, or need."""
    if not roles.is_separate(ROLLOUT):
        return
    separate = config.rollout.separate
    offload = config.weight_sync.offload
    if offload not in ("auto", "none"):
        raise UsageError(
            f"has no effect with {separate}: engines and training do not share devices",
            flag=f"--rl-offload {offload}",
            remedy="drop it",
        )
    if config.rollout.servers:
        _check_content_of_servers(config)
    if config.rewards.reward_model is not None and not roles.is_separate(REWARD):
        raise UsageError(
            f"cannot run on the actor's ranks with {separate}, because engines call it while the "
            "actor trains",
            flag=f"--rl-reward-model {config.rewards.reward_model}",
            remedy="give it ranks of its own by --rl-reward-ranks",
        )


# Flags of engines and hand-overs that servers use, too.
_OF_SERVERS = (
    *("rollout_max_num_seqs", "ranks_per_node", "reshard_bucket_mb", "attest", "offload"),
    *("canary_interval", "canary_tolerance"),
    *("reshard_dtype", "reshard_delta", "reshard_full_interval"),
)
# Flags that change what engines compute or receive.
_OF_CONTENT = ("rollout_dtype", "speculate")


def _unused_by_servers(config: RLConfig) -> dict[str, str]:
    """Return the given flags of engines that a job starts, by name of the option."""
    unused = {}
    for options in (config.engine, config.weight_sync):
        default = type(options)()
        for each in dataclasses.fields(options):
            value = getattr(options, each.name)
            if each.name not in _OF_SERVERS and value and value != getattr(default, each.name):
                unused[each.name] = as_flag(f"rl_{each.name}", value)
    return unused


def _check_content_of_servers(config: RLConfig) -> None:
    unused = _unused_by_servers(config)
    for name in _OF_CONTENT:
        if name in unused:
            raise UsageError(
                "is for engines that the job starts, and has no effect with --rl-rollout-servers",
                flag=unused[name],
                remedy="drop it, and configure the servers where they are started",
            )


def _notes_on_servers(config: RLConfig) -> Iterator[str]:
    """Name flags that have no effect on servers."""
    if config.rollout.servers and (unused := _unused_by_servers(config)):
        yield f"without effect with --rl-rollout-servers: {' '.join(unused.values())}"


def notes_on_sampling_ahead(config: RLConfig, rollout: RolloutLayout) -> Iterator[str]:
    """Describe what engines on ranks of their own sample at a time, and a correction that is left
    out."""
    if not config.rollout.samples_ahead:
        return
    trainer, limit = config.trainer, config.rollout.staleness_limit
    size = config.recipe.num_samples_per_prompt
    most = (limit + 1) * trainer.num_prompts_per_step * size
    num_engines = len(config.rollout.servers) or rollout.num_tp_groups
    room = config.engine.rollout_max_num_seqs * num_engines
    yield (
        f"engines sample ahead: at most ({limit} + 1) x {trainer.num_prompts_per_step} prompts x "
        f"{size} samples = {most:,} responses are in flight, and engines run {room:,} at a time"
    )
    if config.recipe.mismatch_correction == "none" and limit:
        yield (
            f"samples have a staleness of up to {limit} (--rl-max-staleness), which nothing "
            "corrects: consider --rl-mismatch-correction, for example token_tis"
        )
    yield from _notes_on_servers(config)


def check_graphs(options: EngineOptions) -> None:
    """Check that there are CUDA graphs to offload, and that the installed vLLM can do it."""
    flag = "--rl-rollout-offload-cuda-graphs"
    if not options.rollout_offload_cuda_graphs:
        return
    if not vllm_offloads_graphs():
        raise UsageError(
            "needs a vLLM whose sleep mode offloads CUDA graphs, such as 0.32.0, and the "
            "installed one does not",
            flag=flag,
            remedy="drop it, or install the version that scripts/setup_env.sh does",
        )


def check_rollout_dtype(
    config: RLConfig,
    shape: ModelShape,
    checkpoint: HFCheckpoint | None,
    rollout: RolloutLayout,
    *,
    has_cuda: bool,
) -> None:
    """Check that engines can hold weights in FP8 blocks, and that training corrects for that."""
    flag = "--rl-rollout-dtype fp8"
    if not rollout.float8:
        if config.engine.accept_rollout_mismatch:
            raise UsageError(
                f"has no effect without {flag}",
                flag="--rl-accept-rollout-mismatch",
                remedy="drop it",
            )
        return
    if not has_cuda:
        raise UsageError(
            "needs a GPU: vLLM has no kernels for FP8 blocks on CPUs", flag=flag, remedy="drop it"
        )
    require_capability(FLOAT8_BLOCKS, cuda=has_cuda, flag=flag, remedy="drop it")
    if shape.mamba:
        raise UsageError(
            f"is not supported for {shape.architecture}, whose projections of Mamba-2 layers and "
            "experts without a gate have not been tried in FP8",
            flag=flag,
            remedy="drop it",
        )
    if config.trainer.precision != "bf16":
        raise UsageError(
            "needs bf16: vLLM's kernels for FP8 blocks return bfloat16",
            flag=f"{flag} with --rl-precision {config.trainer.precision}",
            remedy="drop one of them",
        )
    if config.engine.speculate.startswith("mtp"):
        raise UsageError(
            "drafts with layers that are not in FP8 blocks, which vLLM does not combine",
            flag=f"--rl-speculate {config.engine.speculate} with {flag}",
            remedy="drop one of them, or give --rl-speculate ngram:N",
        )
    published = frozenset(checkpoint.float8) if checkpoint is not None else frozenset()
    is_stacked = family_of(shape.architecture).has_mxfp4
    if is_stacked or not float8_weights(shape, rollout, published=published or None).weights:
        raise UsageError(
            f"quantises no weight of {shape.architecture} with --rl-rollout-tp-size "
            f"{rollout.tp_size}: vLLM needs linear layers whose shards are multiples of "
            f"{BLOCK} x {BLOCK}, and experts that are not stacked",
            flag=flag,
            remedy="drop it or lower --rl-rollout-tp-size",
        )
    corrects = config.recipe.mismatch_config.correction != "none"
    if not corrects and not config.engine.accept_rollout_mismatch:
        raise UsageError(
            "samples from another policy than the trained one, which loses accuracy without a "
            "correction",
            flag=flag,
            remedy="add --rl-mismatch-correction, for example token_tis, or "
            "--rl-accept-rollout-mismatch",
        )


def check_float8_device(capability: tuple[int, int]) -> None:
    """Check that vLLM has kernels for FP8 blocks on devices of this compute capability."""
    if capability < (9, 0):
        raise UsageError(
            f"needs a GPU of compute capability 9.0 or higher, and this one has "
            f"{capability[0]}.{capability[1]}",
            flag="--rl-rollout-dtype fp8",
            remedy="drop it",
        )
