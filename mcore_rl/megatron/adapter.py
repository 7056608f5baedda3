"""The adapter to the installed Megatron: its parser, start, model and optimizer.

This module handles the differences between releases (0.18 to 0.20); comments mark them. It calls
`megatron.training` and copies nothing from it. Importing it applies the patches that Megatron needs
on this machine, so import it before any `megatron.*`. `version` finds the release.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from mcore_rl.batching.rows import set_prefixes
from mcore_rl.common.agreement import leave_with
from mcore_rl.common.errors import UsageError
from mcore_rl.common.megatron_version import check_megatron
from mcore_rl.common.platform import find_platform
from mcore_rl.common.spans import MegatronTimers
from mcore_rl.megatron import fsdp_buffers as megatron_fsdp
from mcore_rl.megatron.dither import dither_fsdp, dither_optimizer
from mcore_rl.megatron.fsdp_buffers import local_weights
from mcore_rl.model.hybrid_pattern import numbered_layers
from mcore_rl.model.layout import TrainLayout
from mcore_rl.moe.balance import expert_biases
from mcore_rl.patches import megatron as megatron_patches
from mcore_rl.patches.megatron import help_texts

# Without CUDA Megatron warns repeatedly that Apex and Transformer Engine are missing. The resulting
# flags are printed once instead.
warnings.filterwarnings("ignore", message=".*(Apex|[Tt]ransformer[ _-][Ee]ngine).*")
# The first comes from every expert under ETP1, the second from a model that is not used.
warnings.filterwarnings("ignore", message=".*sequence_parallel. is set to .True., but tensor model")
warnings.filterwarnings("ignore", message="MimoModelConfig is experimental")
# Megatron uses names that torch 2.13 renamed.
warnings.filterwarnings(
    "ignore", message=".*(reduce_scatter_tensor|all_gather_into_tensor). is deprecated"
)

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_COPY_QUEUES = "CUDA_DEVICE_MAX_COPY_CONNECTIONS"
_SINKS = ("--wandb-project", "--tensorboard-dir")
_ASYNC_SAVE = "--async-save"
_chosen_here: set[str] = set()  # environment variables set here, not by the user


def prepare() -> None:
    """Check the version and apply the patches that this machine needs. Idempotent.

    Raises UsageError if the version is not supported, Transformer Engine is broken, or Megatron was
    imported before the first call.
    """
    check_megatron()
    # Before CUDA is asked for devices: the driver may read these variables when it starts.
    # Megatron needs this for TP overlap on CUDA, and asserts it everywhere.
    if _QUEUES not in os.environ:
        os.environ[_QUEUES] = "1"
        _chosen_here.add(_QUEUES)
    # One queue orders the kernels, but copies from an offload would then delay the engine's
    # kernels. From compute capability 8.0 on, copies can have queues of their own.
    os.environ.setdefault(_COPY_QUEUES, "8")
    find_platform()
    megatron_patches.apply()


def allow_many_queues() -> None:
    """Allow several queues to the device, as Megatron-FSDP asserts, before CUDA starts.
    A number of queues that the user has set does not change."""
    if _QUEUES in _chosen_here:
        os.environ[_QUEUES] = "8"


def _prepare_on_import() -> None:
    try:
        prepare()
    except UsageError as error:
        # The import precedes any handler in our entry points, so they exit here. A fork that
        # imports this module gets the exception.
        spec = sys.modules["__main__"].__spec__
        if spec is not None and spec.name.startswith("mcore_rl."):
            leave_with(error)
        raise


_prepare_on_import()


def make_parser(
    extra_args: Callable[[argparse.ArgumentParser], Any] | None = None,
) -> argparse.ArgumentParser:
    """Return Megatron's argument parser with `extra_args` added. Megatron's flags have help texts
    only in a process with --help in its command line."""
    from megatron.training.arguments import add_megatron_arguments

    help_texts.apply()
    parser = argparse.ArgumentParser(description="mcore_rl on Megatron-LM", allow_abbrev=False)
    add_megatron_arguments(parser)
    if extra_args is not None:
        extra_args(parser)
    return parser


@contextlib.contextmanager
def megatron_output_to(log: TextIO | None) -> Iterator[None]:
    """Redirect Megatron's output to a log file: its hundreds of lines would bury the run's own."""
    if log is None:
        yield
        return
    with contextlib.redirect_stdout(log):
        yield
    log.flush()


def initialize(
    tokens: Sequence[str],
    extra_args: Callable[[argparse.ArgumentParser], Any],
    *,
    store: torch.distributed.Store | None,
    program: str = "mcore_rl.train",
    **options: Any,
) -> argparse.Namespace:
    """Parse `tokens` with Megatron's parser, validate, and start torch.distributed and the groups.

    Collective. `store` is the rendezvous store if one is already open; `options` are passed to
    `initialize_megatron`. Returns Megatron's args.
    """
    from megatron.training import arguments
    from megatron.training.global_vars import get_args
    from megatron.training.initialize import initialize_megatron

    start = functools.partial(
        initialize_megatron, allow_no_cuda=not torch.cuda.is_available(), store=store, **options
    )
    saved = sys.argv
    # Megatron would start Weights & Biases and TensorBoard on the last rank, and end the job if the
    # former fails. The run directory starts them on rank 0. A flag's last value counts.
    parsed = [token for token in tokens if token != _ASYNC_SAVE]
    sys.argv = [program, *parsed, *(text for flag in _SINKS for text in (flag, ""))]
    try:
        arguments.parse_and_validate_args(extra_args_provider=extra_args)
    finally:
        sys.argv = saved
    start()
    args: argparse.Namespace = get_args()
    for flag in _SINKS:
        setattr(args, flag[2:].replace("-", "_"), _value_of(flag, tokens))
    # From 0.19 on validation switches it off for lack of another kind of writer; see `background`.
    args.async_save = _ASYNC_SAVE in tokens
    args.async_strategy = "mcore"  # not NVIDIA's extension, whose writers need CUDA
    return args


def _value_of(flag: str, tokens: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value")
    value: str | None = parser.parse_known_args(list(tokens))[0].value
    return value


def train_layout(args: argparse.Namespace) -> TrainLayout:
    """Return the parallel degrees in Megatron's args."""
    return TrainLayout(
        world_size=args.world_size,
        tp_size=args.tensor_model_parallel_size,
        pp_size=args.pipeline_model_parallel_size,
        cp_size=args.context_parallel_size,
        ep_size=args.expert_model_parallel_size,
        etp_size=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    )


def decoder_layers_of_layout(layout: str | list[Any], pp_size: int) -> list[list[int]]:
    """Count the decoder layers per stage and chunk of a `--pipeline-model-parallel-layout`.

    Raises Megatron's errors for an invalid one (AssertionError, ValueError, KeyError)."""
    prepare()
    from megatron.core.transformer import pipeline_parallel_layer_layout as layouts
    from megatron.core.transformer.enums import LayerType

    parsed = layouts.PipelineParallelLayerLayout(layout, pp_size)
    return [[kinds.count(LayerType.decoder) for kinds in chunks] for chunks in parsed.layout]


def block_spec(config: Any, vp_stage: int | None) -> Any:
    """Return the spec of this stage's decoder layers, from Transformer Engine if it is used."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if getattr(config, "experimental_attention_variant", None):  # from 0.16 on
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

        return specs.get_transformer_block_with_experimental_attention_variant_spec(
            config, vp_stage=vp_stage
        )
    return get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        vp_stage=vp_stage,
    )


def transformer_config(args: argparse.Namespace) -> Any:
    """Return Megatron's TransformerConfig for these args."""
    from megatron.training.arguments import core_transformer_config_from_args

    return core_transformer_config_from_args(args)


@dataclass(slots=True)
class TrainState:
    """Megatron's training state: model chunks (one per virtual stage), optimizer, scheduler."""

    model: list[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    iteration: int

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """The model chunks without their data-parallel and precision wrappers."""
        return [_unwrapped(chunk) for chunk in self.model]

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.model[0].parameters()).device

    @property
    def optimizers(self) -> list[Any]:
        """The parts of a chained optimizer, or the only optimizer (None without one)."""
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))


def _unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    from megatron.core.utils import unwrap_model

    # Megatron-FSDP wraps twice, and `unwrap_model` removes the outer wrapper only.
    if (wrapped := megatron_fsdp.wrapper_of(chunk)) is not None:
        chunk = wrapped.module
    unwrapped: torch.nn.Module = unwrap_model(chunk)
    return unwrapped


def setup(provider: Callable[..., torch.nn.Module]) -> TrainState:
    """Build model, optimizer and scheduler through Megatron, and load `--load`. Collective.
    If a checkpoint contains code instead of data, every rank exits with code 2."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.utils import get_model_config
    from megatron.training.global_vars import get_args
    from megatron.training.training import setup_model_and_optimizer

    # Megatron's check assumes its own training loop, and ends the process without naming the
    # parameter. `mcore_rl.megatron.optimizer` checks before each update instead.
    args = get_args()
    args.check_for_nan_in_loss_and_grad = False
    try:
        # By keyword: 0.18 changed the order.
        model, optimizer, scheduler = setup_model_and_optimizer(
            model_type=ModelType.encoder_or_decoder, model_provider_func=provider
        )
    except UsageError as error:
        leave_with(error)
    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.timers = MegatronTimers()
    if optimizer is not None and args.overlap_grad_reduce:
        # It marks an update's last micro-batch. Otherwise Megatron uses the first update's number
        # of micro-batches, which changes with packing, and Megatron-FSDP never reduces gradients.
        no_sync = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    if optimizer is not None:
        config.grad_scale_func = optimizer.scale_loss
    state = TrainState(model, optimizer, scheduler, args.iteration)
    _fuse_updates(state)
    return state


def _fuse_updates(state: TrainState) -> None:
    """Make PyTorch's AdamW, Megatron's choice without a GPU, update host memory in one pass.

    By default each of its ten operations reads and writes all parameters. To be called after a
    load, which brings the setting of the checkpoint.
    """
    for optimizer in state.optimizers:
        inner = getattr(optimizer, "optimizer", None)
        for group in inner.param_groups if isinstance(inner, torch.optim.Adam) else ():
            plain = (type(p) in (torch.Tensor, torch.nn.Parameter) for p in group["params"])
            on_host = (p.device.type == "cpu" for p in group["params"])
            group["fused"] = all(plain) and all(on_host)


def setup_without_optimizer(provider: Callable[..., torch.nn.Module]) -> TrainState:
    """Build a model through Megatron for evaluation only. Collective."""
    from megatron.core.enums import ModelType
    from megatron.core.utils import get_model_config
    from megatron.training.training import get_model

    model = get_model(provider, ModelType.encoder_or_decoder, wrap_with_ddp=False)
    for chunk in model:
        chunk.requires_grad_(False)
        get_model_config(chunk).timers = MegatronTimers()
    return TrainState(model, None, None, 0)


def forward_backward(
    state: TrainState,
    forward_step: Callable[..., Any],
    data: Sequence[Any],
    *,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool,
) -> list[Any]:
    """Run Megatron's pipeline schedule over the micro-batches in `data`. Collective.

    `seq_length` is the length of full rows; the schedule divides it by CP and TP.

    Returns one entry per micro-batch on the last pipeline stage (the loss function's second return
    value, or its non-loss data with `forward_only`), and an empty list elsewhere.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    num_chunks = len(state.model)
    returned: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(data) for _ in range(num_chunks)] if num_chunks > 1 else iter(data),
        model=state.model,
        num_microbatches=len(data),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return returned


def packed_samples(
    cu_seqlens: torch.Tensor | None,
    longest: int,
    prefix_of: torch.Tensor | None = None,
    row_tokens: int | None = None,
) -> Any:
    """Return Megatron's `PackedSeqParams` for a packed row; None if `cu_seqlens` is None.

    `cu_seqlens` is `[k + 1]` int32, from 0 to the length of the row; `longest` is the length of the
    longest sample. Under context parallelism both describe the full row. Both include the samples'
    padding. `prefix_of` is as in `ModelRows`, for the layers of `patches/megatron` only.
    Mamba-2 kernels separate samples only if `row_tokens`, the length of the full row, is given.
    """
    if cu_seqlens is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    if prefix_of is not None:
        set_prefixes(cu_seqlens, prefix_of)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        # Releases without HybridModel lack the field.
        **({} if row_tokens is None else {"total_tokens": row_tokens}),
    )


def zero_gradients(state: TrainState) -> None:
    """Clear the gradient buffers of the model and the optimizer."""
    chunk: Any  # in its data-parallel wrapper
    for chunk in state.model:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()


def weights(state: TrainState) -> list[torch.Tensor]:
    """Return this rank's parameters and expert biases, not copied; of sharded ones the local rows.
    After writing to them, call `weights_written` before the next forward."""
    parameters = [weight.data for chunk in state.chunks for weight in local_weights(chunk)]
    return parameters + expert_biases(state.chunks)


def weights_written(state: TrainState) -> None:
    """Make the next forward use parameters that were written from outside Megatron."""
    for fsdp in _fsdp_wrappers(state):
        megatron_fsdp.forget_gathered(fsdp)


def reload_main_params(state: TrainState) -> None:
    """Copy parameters that were written from outside Megatron to the optimizer's float32 copies."""
    weights_written(state)
    if fsdp_wrappers := _fsdp_wrappers(state):
        for fsdp in fsdp_wrappers:
            megatron_fsdp.copy_weights_to_main_weights(fsdp)
    elif state.optimizer is not None:
        state.optimizer.reload_model_params()


def dither_main_params(state: TrainState) -> None:
    """Dither the optimizer's float32 copies of 16-bit weights (see `dither`). Call it after
    `reload_main_params`, or after a load without the optimizer's copies."""
    if fsdp_wrappers := _fsdp_wrappers(state):
        for fsdp in fsdp_wrappers:
            dither_fsdp(fsdp)
        return
    for optimizer in state.optimizers:
        if optimizer is not None:
            dither_optimizer(optimizer)


def finish_param_sync(args: argparse.Namespace, state: TrainState) -> None:
    """Wait until every parameter holds the last update (with --overlap-param-gather it may not)."""
    if fsdp_wrappers := _fsdp_wrappers(state):
        for fsdp in fsdp_wrappers:
            megatron_fsdp.finish_param_sync(fsdp)
    elif args.overlap_param_gather:
        from megatron.training.training import force_param_sync

        # Up to 0.18 no optimizer gathers parameters itself.
        gathers = "optimizer" in inspect.signature(force_param_sync).parameters
        force_param_sync(state.model, **({"optimizer": state.optimizer} if gathers else {}))


def train_tensors(state: TrainState) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Return this rank's training tensors that persist between updates: kind -> (name, tensor).

    The kinds are `parameters`, `gradients` (data-parallel buffers, and the optimizer's gradients)
    and `optimizer` (main parameters, moments). Tensors may share storage, within a kind (all
    parameters in one buffer) and across kinds (a float32 run's main parameters are the parameters).
    """
    by_kind: dict[str, list[tuple[str, torch.Tensor]]] = {
        "parameters": [],
        "gradients": [],
        "optimizer": [],
    }
    fsdp_wrappers = _fsdp_wrappers(state)
    for number, fsdp in enumerate(fsdp_wrappers):
        megatron_fsdp.add_tensors(by_kind, fsdp, number)
    chunk: Any  # in its data-parallel wrapper
    for number, chunk in enumerate([] if fsdp_wrappers else state.model):
        for name, parameter in chunk.named_parameters():
            by_kind["parameters"].append((name, parameter))
            _add_gradients(by_kind, name, parameter)
        for index, buffer in enumerate([*chunk.buffers, *chunk.expert_parallel_buffers]):
            name = f"gradient buffer {index} of model chunk {number}"
            by_kind["gradients"] += [
                (name, t) for t in (buffer.grad_data, *buffer.extra_main_grads)
            ]
    for number, optimizer in enumerate(state.optimizers):
        if optimizer is None or optimizer.is_stub_optimizer:  # nothing to train on this rank
            continue
        parameters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
        # --optimizer-cpu-offload keeps what stays on the device separately, with its gradients.
        parameters += getattr(optimizer.optimizer, "param_to_fp32_param", {}).values()
        for index, parameter in enumerate(parameters):
            name = f"main parameter {index} of optimizer {number}"
            by_kind["optimizer"].append((name, megatron_fsdp.local(parameter)))
            _add_gradients(by_kind, name, parameter)
        for index, values in enumerate(optimizer.optimizer.state.values()):
            by_kind["optimizer"] += [
                (f"{key} {index} of optimizer {number}", megatron_fsdp.local(value))
                for key, value in values.items()
                if torch.is_tensor(value)
            ]
    return by_kind


def finished_gradients(state: TrainState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter's name and this rank's part of its gradient, reduced over DP."""
    for chunk in state.chunks:
        for name, parameter in chunk.named_parameters():
            for attribute in ("main_grad", "grad", "decoupled_grad"):
                if (gradient := getattr(parameter, attribute, None)) is not None:
                    yield name, megatron_fsdp.local(gradient)
                    break


def _fsdp_wrappers(state: TrainState) -> list[Any]:
    """Return the MegatronFSDP of each model chunk; an empty list without Megatron-FSDP."""
    wrappers = [megatron_fsdp.wrapper_of(chunk) for chunk in state.model]
    return [fsdp for fsdp in wrappers if fsdp is not None]


def _add_gradients(
    by_kind: dict[str, list[tuple[str, torch.Tensor]]], name: str, parameter: torch.Tensor
) -> None:
    # The precision-aware optimizer uses `decoupled_grad`.
    for attribute in ("grad", "decoupled_grad"):
        if (gradient := getattr(parameter, attribute, None)) is not None:
            by_kind["gradients"].append((f"{attribute} of {name}", megatron_fsdp.local(gradient)))


def stage_layers(chunk: Any) -> tuple[int, ...]:
    """Return the global numbers, from 0, of the transformer layers of a chunk's decoder layers."""
    return tuple(number for number, _ in numbered_layers(chunk))


def model_parallel_groups() -> dict[str, torch.distributed.ProcessGroup]:
    """Return the process groups that mcore_rl uses: `tp`, `pp`, `cp`, `dp` (without CP)."""
    from megatron.core import parallel_state

    return {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
    }


def broadcast_groups() -> dict[str, torch.distributed.ProcessGroup]:
    """Return this rank's groups of `TrainLayout.groups`, by the same names."""
    from megatron.core import parallel_state

    return {
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "tp": parallel_state.get_tensor_model_parallel_group(),
    }
