"""From a command line to a Megatron with the checkpoint's weights in it.

`start` checks everything (all ranks agree before anyone leaves), then starts Megatron;
`build_actor` builds model and optimizer and loads the Hugging Face checkpoint into the shards.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import torch.distributed as dist

from mcore_rl import megatron_adapter
from mcore_rl.agreement import agreed, open_store
from mcore_rl.arguments import RLConfig, add_rl_args
from mcore_rl.checkpoint import HFCheckpoint, check_complete, load_into_megatron
from mcore_rl.critic_startup import CheckedCritic
from mcore_rl.hf_config import ModelShape, settings_without_flag
from mcore_rl.hybrid_engine.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.hybrid_engine.model_shards import ModelShards
from mcore_rl.policy_model import make_actor_provider, make_policy_provider
from mcore_rl.preflight import Checked, check_command_line, check_parsed_args

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """What is known once Megatron runs; the same on all ranks but for `args.rank`."""

    args: argparse.Namespace
    config: RLConfig
    shape: ModelShape
    checkpoint: HFCheckpoint
    train_layout: TrainLayout
    layers: PipelineLayers
    rollout_layout: RolloutLayout
    critic: CheckedCritic | None


def start(
    tokens: Sequence[str],
    *,
    also_check: Callable[[Checked], None] | None = None,
    log: TextIO | None = None,
    program: str = "mcore_rl.train",
) -> Job:
    """Check the command line on all ranks and start Megatron. Collective.

    `also_check` adds checks of an entry point's own, under the same agreement. A user's mistake
    ends every rank with exit code 2. Megatron's own output goes to `log`.
    """
    store = open_store()
    has_cuda = torch.cuda.is_available()

    def check() -> Checked:
        checked = check_command_line(tokens, has_cuda=has_cuda)
        if also_check is not None:
            also_check(checked)
        return checked

    checked = agreed(check, store, stage="input")
    _say(checked, has_cuda)
    with megatron_adapter.megatron_output_to(log):
        args = megatron_adapter.initialize(
            checked.tokens,
            add_rl_args,
            # A process without a launcher is a world of its own.
            store=dist.HashStore() if store is None else dist.PrefixStore("megatron", store),
            program=program,
        )
    return _job(args, checked)


def job_from_args(
    args: argparse.Namespace, *, also_check: Callable[[Checked], None] | None = None
) -> Job:
    """The job of a fork that parsed the arguments and initialised Megatron itself. Collective.

    The same checks and the same agreement as in `start`; the architecture in `args` must be that of
    the checkpoint's config.json.
    """

    def check() -> Checked:
        checked = check_parsed_args(args, has_cuda=torch.cuda.is_available())
        if also_check is not None:
            also_check(checked)
        return checked

    store = dist.distributed_c10d._get_default_store() if dist.get_world_size() > 1 else None
    return _job(args, agreed(check, store, stage="input"))


def _job(args: argparse.Namespace, checked: Checked) -> Job:
    for name, value in settings_without_flag(checked.shape).items():
        setattr(args, name, value)  # Megatron fills its model configuration from here, by name
    return Job(
        args=args,
        config=RLConfig.from_args(args),
        shape=checked.shape,
        checkpoint=checked.checkpoint,
        train_layout=checked.train_layout,
        layers=checked.layers,
        rollout_layout=checked.rollout_layout,
        critic=checked.critic,
    )


def _say(checked: Checked, has_cuda: bool) -> None:
    if int(os.environ.get("RANK", 0)) != 0:
        return
    logger.info("derived from config.json: %s", " ".join(checked.derived.architecture))
    if not has_cuda:
        logger.info("no CUDA here, so Megatron runs with: %s", " ".join(checked.derived.machine))
    logger.info("defaults for RL: %s", " ".join(checked.derived.defaults))
    if checked.checkpoint.num_skipped_mtp:
        logger.info(
            "the checkpoint's multi-token-prediction layers (%d tensors) are left out: RL trains "
            "and samples the model without them",
            checked.checkpoint.num_skipped_mtp,
        )
    logger.info(
        "train %s; rollout %s",
        checked.train_layout.describe(),
        checked.rollout_layout.describe(),
    )


def build_actor(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> tuple[megatron_adapter.TrainState, ModelShards]:
    """Build the actor through Megatron and fill it from the Hugging Face checkpoint. Collective.

    With `--load` naming a Megatron checkpoint, its weights win and the Hugging Face ones are not
    read. `model_provider` is a fork's own; without it the model follows config.json.
    """
    provider = make_policy_provider(
        model_provider or make_actor_provider(job.args, job.shape),
        real_vocab_size=job.shape.vocab_size,
        chunk_tokens=job.config.log_prob_chunk_tokens,
    )
    with megatron_adapter.megatron_output_to(log):
        state = megatron_adapter.setup(provider)
    shards = ModelShards(
        state.chunks, job.shape, job.train_layout, dist.get_rank(), dict(job.checkpoint.tensors)
    )
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, shards.tensors())
    check_complete(job.checkpoint, set().union(*held))
    if state.iteration == 0:
        num_bytes = load_into_megatron(job.checkpoint, shards)
        megatron_adapter.reload_main_params(state)
        logger.info("read %.1f MB of %s", num_bytes / 1e6, job.checkpoint.folder)
    return state, shards
