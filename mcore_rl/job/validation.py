"""Finding what Megatron itself would refuse, before it starts."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
import warnings
from collections.abc import Sequence

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import ExtraArgs
from mcore_rl.common.variables import variables
from mcore_rl.flags.parser import all_args
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.model.config_json import ModelShape

# Exceptions of Megatron's validation and configuration for unusable values.
_REFUSALS = (
    *(AssertionError, ValueError, RuntimeError, ImportError, OSError, SystemExit),
    *(ArithmeticError, LookupError),
)


def world_of_size(size: int) -> contextlib.AbstractContextManager[None]:
    """Act as the first rank of such a world, for code that only reads flags."""
    return variables({"RANK": "0", "WORLD_SIZE": str(size)})


def check_megatron_accepts(
    tokens: Sequence[str],
    shape: ModelShape,
    *,
    world_size: int | None = None,
    extra_args: ExtraArgs = all_args,
) -> None:
    """Run Megatron's own validation; make its tokenizer and its models' configuration.

    `world_size` counts the ranks of the flags' model (default: this process's world). `extra_args`
    adds all flags that are not Megatron's own. Megatron repeats this when it starts, where a
    refusal would be an assertion's traceback on each rank.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import parse_args, validate_args

    saved, printed = sys.argv, io.StringIO()
    sys.argv = ["mcore_rl", *tokens]
    try:
        with (
            world_of_size(world_size) if world_size else contextlib.nullcontext(),
            megatron_adapter.megatron_output_to(printed),
            contextlib.redirect_stderr(printed),  # argparse's errors, on flags that a fork requires
            warnings.catch_warnings(action="ignore"),
        ):
            args = parse_args(extra_args)
            padded = args.padded_vocab_size  # as given
            validate_args(args)
            megatron_adapter.transformer_config(args)
            build_tokenizer(args)
    except _REFUSALS as error:
        raise UsageError(
            f"Megatron refuses these flags ({_reason(error, printed.getvalue())})",
            remedy="change or drop the flag it names",
        ) from error
    finally:
        sys.argv = saved
    if args.padded_vocab_size < shape.vocab_size:
        raise UsageError(
            f"gives Megatron {args.padded_vocab_size} tokens, but the checkpoint's vocab_size is "
            f"{shape.vocab_size}",
            flag=f"--padded-vocab-size {padded}"
            if padded is not None
            else f"--tokenizer-type {args.tokenizer_type}",
            remedy="drop the flag, the checkpoint's own vocabulary is used",
        )
    if args.padded_vocab_size % args.tensor_model_parallel_size:
        raise UsageError(
            f"leaves {args.padded_vocab_size} tokens, which --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} does not divide",
            flag=f"--padded-vocab-size {padded}" if args.pad_vocab_size else "--no-pad-vocab-size",
            remedy="drop it",
        )


def _reason(error: BaseException, printed: str) -> str:
    """Return Megatron's message, else what it printed before it exited, else its assertion."""
    if isinstance(error, SystemExit):
        return next((line for line in reversed(printed.splitlines()) if line.strip()), repr(error))
    return str(error) or traceback.extract_tb(error.__traceback__)[-1].line or repr(error)
