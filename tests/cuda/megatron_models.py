"""Megatron's models for CUDA on `meta`, as any rank of a world of any size: for jobs of tests/cuda.

`prepare` comes first in a job, before anything imports megatron or mcore_rl. Groups are those of
torch's fake process group, which sends nothing. The command line is derived, parsed and validated
as a run's; the model is what `mcore_rl.megatron.model_provider` makes of it, without its weights.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.cuda import standins

if TYPE_CHECKING:
    from mcore_rl.common.platform import Platform
    from mcore_rl.model.config_json import ModelShape
    from mcore_rl.model.layout import TrainLayout

_APEX = "fused_weight_gradient_mlp_cuda"


def prepare(*, transformer_engine: bool) -> Platform:
    """Make this process one with a GPU, without Apex; what mcore_rl finds of it.

    Transformer Engine is the installed one.
    """
    if transformer_engine:
        standins.transformer_engine_extension()
    else:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # ImportError
    set_apex(False)
    standins.cuda_device()
    # Megatron's layers ask for the device they are made on; none is made on a real one.
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
    from mcore_rl.common.platform import find_platform
    from mcore_rl.megatron import adapter  # noqa: F401  (first: it applies the patches)

    return find_platform()


def set_apex(has_apex: bool) -> None:
    """Have a stand-in for Apex's module or none, for Megatron too where it has looked already."""
    module = ModuleType(_APEX)
    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        setattr(module, name, standins.needs_gpu(f"{_APEX}.{name}"))
    sys.modules[_APEX] = module if has_apex else None  # type: ignore[assignment]
    layers: Any = sys.modules.get("megatron.core.tensor_parallel.layers")
    if layers is not None:
        layers._grad_accum_fusion_available = has_apex


@dataclass(frozen=True)
class Job:
    """A command line of a model, validated by Megatron."""

    shape: ModelShape
    layout: TrainLayout
    tokens: tuple[str, ...]
    args: argparse.Namespace


def parsed(tokens: Sequence[str], shape: ModelShape, platform: Platform, *, world_size: int) -> Job:
    """`tokens` as a user gives them, with what is derived of them. UsageError as at a start."""
    from mcore_rl.config import config_from
    from mcore_rl.flags.derived import derive_flags
    from mcore_rl.flags.parsed_flags import expand_config, given_values
    from mcore_rl.flags.parser import add_rl_args
    from mcore_rl.job.reading import make_parser
    from mcore_rl.job.validation import check_megatron_accepts, world_of_size
    from mcore_rl.megatron import adapter as megatron_adapter
    from mcore_rl.megatron.world import parsed_args
    from mcore_rl.model.architecture_flags import settings_without_flag

    parser = make_parser()
    tokens = expand_config(tokens, parser)
    given = given_values(tokens, parser)
    config = config_from(given)
    derived = derive_flags(shape, config, given, parser=parser, platform=platform)
    whole = (*derived.tokens, *tokens)
    with world_of_size(world_size), contextlib.redirect_stdout(io.StringIO()):
        check_megatron_accepts(whole, shape)
        like = argparse.Namespace(rank=0, local_rank=0, async_save=False, async_strategy="mcore")
        args = parsed_args(whole, add_rl_args, like, log=io.StringIO())
    for name, value in settings_without_flag(shape).items():
        setattr(args, name, value)
    # Nothing is to be allocated, and nothing drawn.
    args.init_model_with_meta_device, args.perform_initialization = True, False
    return Job(shape, megatron_adapter.train_layout(args), whole, args)


@contextlib.contextmanager
def as_rank(job: Job, rank: int) -> Iterator[None]:
    """In which this process is `rank` of the job's world, with Megatron's groups."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layout = job.layout
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        context_parallel_size=layout.cp_size,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.etp_size,
        create_gloo_process_groups=False,
    )
    # Mamba-2 layers draw in any case, which does nothing on `meta`.
    get_cuda_rng_tracker().fork = contextlib.nullcontext
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(job: Job, model_class: str = "auto") -> torch.nn.Module:
    """This rank's model, as a start builds it, on `meta`. Within `as_rank`.
    `model_class` is --rl-model-class."""
    from megatron.core import parallel_state

    from mcore_rl.megatron.model_provider import make_actor_provider
    from mcore_rl.megatron.value_head import make_critic_provider

    provider: Any = make_actor_provider(job.args, job.shape, model_class)
    if job.shape.value_head:
        provider = make_critic_provider(provider)
    # Transformer Engine names CUDA itself.
    with torch.device("meta"), standins.CudaOnMeta(), contextlib.redirect_stdout(io.StringIO()):
        return provider(
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
