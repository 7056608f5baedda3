"""The only module that knows which Megatron runs: its parser, its start, its model and optimizer.

Everything here calls `megatron.training` (0.17 to 0.20, what differs is said where it matters);
nothing is copied from it. Importing this module applies the patches that Megatron needs on this
machine, so import it before any `megatron.*`. Which one that is says `megatron_version`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from mcore_rl.batching.rows import set_prefixes
from mcore_rl.common.agreement import leave_with
from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import find_platform
from mcore_rl.megatron import fsdp as megatron_fsdp
from mcore_rl.megatron.fsdp import local_weights
from mcore_rl.megatron.version import check_megatron
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import TrainLayout
from mcore_rl.moe.balance import expert_biases
from mcore_rl.patches import megatron as megatron_patches

# Without CUDA Megatron says several times that it has no Apex and no Transformer Engine; the flags
# that follow from this are printed once instead.
warnings.filterwarnings("ignore", message=".*(Apex|[Tt]ransformer[ _-][Ee]ngine).*")
# Said by every expert under ETP1, and by a model nobody asked for.
warnings.filterwarnings("ignore", message=".*sequence_parallel. is set to .True., but tensor model")
warnings.filterwarnings("ignore", message="MimoModelConfig is experimental")
# Names that torch 2.13 renamed and Megatron uses.
warnings.filterwarnings(
    "ignore", message=".*(reduce_scatter_tensor|all_gather_into_tensor). is deprecated"
)

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_COPY_QUEUES = "CUDA_DEVICE_MAX_COPY_CONNECTIONS"
_SINKS = ("--wandb-project", "--tensorboard-dir")
_chosen_here: set[str] = set()  # variables that the user has not set


def prepare() -> None:
    """Check the version and apply the patches this machine needs. Idempotent.

    UsageError: the version is not supported, Transformer Engine is broken, or Megatron was imported
    before the first call.
    """
    check_megatron()
    find_platform()
    # Megatron requires it for TP overlap on CUDA and asserts it everywhere.
    if _QUEUES not in os.environ:
        os.environ[_QUEUES] = "1"
        _chosen_here.add(_QUEUES)
    # That is for the order of kernels. What an offload brings back would stand in the same queue
    # before the engine's kernels; from compute capability 8.0 on copies can have their own.
    os.environ.setdefault(_COPY_QUEUES, "8")
    megatron_patches.apply()


def allow_many_queues() -> None:
    """For Megatron-FSDP, which asserts the opposite: unless the user has said how many queues to
    the device there are. Before CUDA starts."""
    if _QUEUES in _chosen_here:
        os.environ[_QUEUES] = "8"


def _prepare_on_import() -> None:
    try:
        prepare()
    except UsageError as error:
        # This is imported before an entry point of ours has a line to catch it in; a fork that
        # imports us gets the exception.
        spec = sys.modules["__main__"].__spec__
        if spec is not None and spec.name.startswith("mcore_rl."):
            leave_with(error)
        raise


_prepare_on_import()


def make_parser(
    extra_args: Callable[[argparse.ArgumentParser], Any] | None = None,
) -> argparse.ArgumentParser:
    """Megatron's own argument parser, `extra_args` added."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(description="mcore_rl on Megatron-LM", allow_abbrev=False)
    add_megatron_arguments(parser)
    if extra_args is not None:
        extra_args(parser)
    return parser


@contextlib.contextmanager
def megatron_output_to(log: TextIO | None) -> Iterator[None]:
    """Send what Megatron prints to a log file: its hundreds of lines would bury the run's own."""
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

    Collective. `store` is the rendezvous store if one is open already, `options` are further ones
    of `initialize_megatron`. Returns Megatron's args.
    """
    from megatron.training import arguments
    from megatron.training.global_vars import get_args
    from megatron.training.initialize import initialize_megatron

    start = functools.partial(
        initialize_megatron, allow_no_cuda=not torch.cuda.is_available(), store=store, **options
    )
    saved = sys.argv
    # Megatron would start Weights & Biases and TensorBoard on the last rank, and let a failure of
    # the former end the job; the run directory does so on rank 0. The last one of a flag counts.
    sys.argv = [program, *tokens, *(text for flag in _SINKS for text in (flag, ""))]
    try:
        if hasattr(arguments, "parse_and_validate_args"):
            arguments.parse_and_validate_args(extra_args_provider=extra_args)
        else:  # up to 0.17 the start validates
            start = functools.partial(start, parsed_args=arguments.parse_args(extra_args))
    finally:
        sys.argv = saved
    start()
    args: argparse.Namespace = get_args()
    for flag in _SINKS:
        setattr(args, flag[2:].replace("-", "_"), _value_of(flag, tokens))
    return args


def _value_of(flag: str, tokens: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value")
    value: str | None = parser.parse_known_args(list(tokens))[0].value
    return value


def train_layout(args: argparse.Namespace) -> TrainLayout:
    """The parallel degrees in Megatron's args."""
    return TrainLayout(
        world_size=args.world_size,
        tp_size=args.tensor_model_parallel_size,
        pp_size=args.pipeline_model_parallel_size,
        cp_size=args.context_parallel_size,
        ep_size=args.expert_model_parallel_size,
        etp_size=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    )


def decoder_layers_of_layout(layout: str | list[Any], pp_size: int) -> list[list[int]]:
    """Decoder layers per stage and model chunk of a `--pipeline-model-parallel-layout`.

    Raises what Megatron raises for one that it cannot read (AssertionError, ValueError, KeyError).
    """
    prepare()
    from megatron.core.transformer import pipeline_parallel_layer_layout as layouts
    from megatron.core.transformer.enums import LayerType

    parsed = layouts.PipelineParallelLayerLayout(layout, pp_size)
    return [[kinds.count(LayerType.decoder) for kinds in chunks] for chunks in parsed.layout]


def block_spec(config: Any, vp_stage: int | None) -> Any:
    """The decoder layers of this stage: Transformer Engine's where it is installed, else local."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        vp_stage=vp_stage,
    )


def transformer_config(args: argparse.Namespace) -> Any:
    """Megatron's TransformerConfig for these args."""
    from megatron.training.arguments import core_transformer_config_from_args

    return core_transformer_config_from_args(args)


@dataclass(slots=True)
class TrainState:
    """What Megatron trains: model chunks (one, or one per virtual stage), optimizer, scheduler."""

    model: list[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    iteration: int

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """The model chunks without their data-parallel and precision wrappers."""
        return [_unwrapped(chunk) for chunk in self.model]


def _unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    from megatron.core.utils import unwrap_model

    # Megatron-FSDP wraps twice, and Megatron knows of the outer wrapper only.
    if (wrapped := megatron_fsdp.wrapper_of(chunk)) is not None:
        chunk = wrapped.module
    unwrapped: torch.nn.Module = unwrap_model(chunk)
    return unwrapped


def setup(provider: Callable[..., torch.nn.Module]) -> TrainState:
    """Build model, optimizer and scheduler through Megatron; load `--load`. Collective.

    A checkpoint that holds code instead of data ends every rank with exit code 2.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.utils import get_model_config
    from megatron.training.global_vars import get_args
    from megatron.training.training import setup_model_and_optimizer

    # That check asserts that Megatron's own training loop runs, and ends the process without naming
    # the parameter; `mcore_rl.megatron.optimizer` does it before each update.
    args = get_args()
    args.check_for_nan_in_loss_and_grad = False
    try:
        # By name: 0.18 changed the order.
        model, optimizer, scheduler = setup_model_and_optimizer(
            model_type=ModelType.encoder_or_decoder, model_provider_func=provider
        )
    except UsageError as error:
        leave_with(error)
    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.timers = None  # stages are timed outside
    if optimizer is not None and args.overlap_grad_reduce:
        # It marks an update's last micro-batch. Else Megatron goes by the number that the first
        # update had, which changes with packing, and Megatron-FSDP never adds anything up.
        no_sync = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    if optimizer is not None:
        config.grad_scale_func = optimizer.scale_loss
    return TrainState(model, optimizer, scheduler, args.iteration)


def setup_without_optimizer(provider: Callable[..., torch.nn.Module]) -> TrainState:
    """Build a model through Megatron that is only ever evaluated. Collective."""
    from megatron.core.enums import ModelType
    from megatron.core.utils import get_model_config
    from megatron.training.training import get_model

    model = get_model(provider, ModelType.encoder_or_decoder, wrap_with_ddp=False)
    for chunk in model:
        chunk.requires_grad_(False)
        get_model_config(chunk).timers = None
    return TrainState(model, None, None, 0)


def forward_backward(
    state: TrainState,
    forward_step: Callable[..., Any],
    data: Sequence[Any],
    *,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool,
    collect: bool = False,
) -> list[Any]:
    """Run Megatron's pipeline schedule over the micro-batches in `data`. Collective.

    `seq_length` is that of whole rows, which the schedule divides by CP and TP.

    Returns one entry a micro-batch on the last pipeline stage (what the loss function returned
    beside the loss, or its non-loss data with `collect`), an empty list elsewhere.
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
        collect_non_loss_data=collect,
    )
    return returned


def packed_samples(
    cu_seqlens: torch.Tensor | None, longest: int, prefix_of: torch.Tensor | None = None
) -> Any:
    """What tells Megatron's attention where the samples of a packed row begin; None for None.

    `cu_seqlens` `[k + 1]` int32, from 0 to the length of the row; `longest` of the samples. Both
    are of the whole row under context parallelism, and count what samples are padded by.
    `prefix_of` as in `ModelRows`, for the layers of `patches/megatron` only.
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
    )


def zero_gradients(state: TrainState) -> None:
    """Clear the gradient buffers of the model and the optimizer."""
    chunk: Any  # in its data-parallel wrapper
    for chunk in state.model:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()


def weights(state: TrainState) -> list[torch.Tensor]:
    """This rank's parameters and biases of experts, where they stay: of sharded ones the rows that
    are here. Whoever writes them calls `weights_written` before the next forward.
    """
    parameters = [weight.data for chunk in state.chunks for weight in local_weights(chunk)]
    return parameters + expert_biases(state.chunks)


def weights_written(state: TrainState) -> None:
    """Make the next forward compute with parameters that were written from outside."""
    for fsdp in _fsdp_wrappers(state):
        megatron_fsdp.forget_gathered(fsdp)


def reload_main_params(state: TrainState) -> None:
    """Make the optimizer's float32 copies follow parameters that were written from outside."""
    weights_written(state)
    if fsdp_wrappers := _fsdp_wrappers(state):
        for fsdp in fsdp_wrappers:
            megatron_fsdp.copy_weights_to_main_weights(fsdp)
    elif state.optimizer is not None:
        state.optimizer.reload_model_params()


def finish_param_sync(args: argparse.Namespace, state: TrainState) -> None:
    """Wait until every parameter holds the last update (with --overlap-param-gather it may not)."""
    if fsdp_wrappers := _fsdp_wrappers(state):
        for fsdp in fsdp_wrappers:
            megatron_fsdp.finish_param_sync(fsdp)
    elif args.overlap_param_gather:
        from megatron.training.training import force_param_sync

        # Up to 0.18 there is no optimizer that gathers by itself.
        gathers = "optimizer" in inspect.signature(force_param_sync).parameters
        force_param_sync(state.model, **({"optimizer": state.optimizer} if gathers else {}))


def rng_tracker_states() -> dict[str, torch.Tensor]:
    """Copies of the states of Megatron's RNG tracker."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        # With CUDA graphs or Transformer Engine's tracker a state is a generator.
        name: state.get_state() if isinstance(state, torch.Generator) else state.clone()
        for name, state in get_cuda_rng_tracker().get_states().items()
    }


def set_rng_tracker_states(states: Mapping[str, torch.Tensor]) -> None:
    """Put back what `rng_tracker_states` returned."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    now = get_cuda_rng_tracker().get_states()
    for name, state in states.items():
        if isinstance(generator := now.get(name), torch.Generator):
            generator.set_state(state)  # captured graphs point to it
        else:
            now[name] = state.clone()
    get_cuda_rng_tracker().set_states(now)


def train_tensors(state: TrainState) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """What training keeps in memory between two updates: kind -> (name, tensor), all of this rank.

    `parameters`, `gradients` (the data-parallel buffers, and what the optimizer made of them) and
    `optimizer` (main parameters, moments). Tensors may share storages, within a kind (all
    parameters in one buffer) and across (the main parameters of a float32 run are the parameters).
    """
    found: dict[str, list[tuple[str, torch.Tensor]]] = {
        "parameters": [],
        "gradients": [],
        "optimizer": [],
    }
    fsdp_wrappers = _fsdp_wrappers(state)
    for number, fsdp in enumerate(fsdp_wrappers):
        megatron_fsdp.add_tensors(found, fsdp, number)
    chunk: Any  # in its data-parallel wrapper
    for number, chunk in enumerate([] if fsdp_wrappers else state.model):
        for name, parameter in chunk.named_parameters():
            found["parameters"].append((name, parameter))
            _add_gradients(found, name, parameter)
        for index, buffer in enumerate([*chunk.buffers, *chunk.expert_parallel_buffers]):
            name = f"gradient buffer {index} of model chunk {number}"
            found["gradients"] += [(name, t) for t in (buffer.grad_data, *buffer.extra_main_grads)]
    optimizers = getattr(state.optimizer, "chained_optimizers", [state.optimizer])
    for number, optimizer in enumerate(optimizers):
        if optimizer is None or optimizer.is_stub_optimizer:  # nothing to train on this rank
            continue
        parameters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
        # --optimizer-cpu-offload keeps what it leaves on the device apart, with its gradients.
        parameters += getattr(optimizer.optimizer, "param_to_fp32_param", {}).values()
        for index, parameter in enumerate(parameters):
            name = f"main parameter {index} of optimizer {number}"
            found["optimizer"].append((name, megatron_fsdp.local(parameter)))
            _add_gradients(found, name, parameter)
        for index, values in enumerate(optimizer.optimizer.state.values()):
            found["optimizer"] += [
                (f"{key} {index} of optimizer {number}", megatron_fsdp.local(value))
                for key, value in values.items()
                if torch.is_tensor(value)
            ]
    return found


def finished_gradients(state: TrainState) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and gradient of each parameter, added up over data parallelism; this rank's part."""
    for chunk in state.chunks:
        for name, parameter in chunk.named_parameters():
            for attribute in ("main_grad", "grad", "decoupled_grad"):
                if (gradient := getattr(parameter, attribute, None)) is not None:
                    yield name, megatron_fsdp.local(gradient)
                    break


def _fsdp_wrappers(state: TrainState) -> list[Any]:
    """The MegatronFSDP of each model chunk; none without Megatron-FSDP."""
    found = [megatron_fsdp.wrapper_of(chunk) for chunk in state.model]
    return [fsdp for fsdp in found if fsdp is not None]


def _add_gradients(
    found: dict[str, list[tuple[str, torch.Tensor]]], name: str, parameter: torch.Tensor
) -> None:
    # The second one belongs to the precision-aware optimizer.
    for attribute in ("grad", "decoupled_grad"):
        if (gradient := getattr(parameter, attribute, None)) is not None:
            found["gradients"].append((f"{attribute} of {name}", megatron_fsdp.local(gradient)))


def stage_layers(chunk: Any) -> tuple[int, ...]:
    """Global numbers, from 0, of the decoder layers in a model chunk."""
    return tuple(layer.layer_number - 1 for layer in chunk.decoder.layers)


def model_parallel_groups() -> dict[str, torch.distributed.ProcessGroup]:
    """The process groups mcore_rl speaks over: `tp`, `pp`, `cp`, `dp` (without CP)."""
    from megatron.core import parallel_state

    return {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
    }


def broadcast_groups() -> dict[str, torch.distributed.ProcessGroup]:
    """This rank's groups of `TrainLayout.groups`, by the same names."""
    from megatron.core import parallel_state

    return {
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "tp": parallel_state.get_tensor_model_parallel_group(),
    }


def padded_vocab_size(shape: ModelShape, args: argparse.Namespace) -> int:
    """Rows of the embedding over all TP ranks."""
    assert args.padded_vocab_size >= shape.vocab_size, (args.padded_vocab_size, shape.vocab_size)
    return int(args.padded_vocab_size)
