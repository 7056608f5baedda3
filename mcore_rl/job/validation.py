"""What Megatron itself would refuse, found before it starts."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
import warnings
from collections.abc import Sequence

from mcore_rl.common.errors import UsageError
from mcore_rl.flags.options import ExtraArgs, add_rl_args
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.model.config_json import ModelShape


def check_megatron_accepts(
    tokens: Sequence[str], shape: ModelShape, *, extra_args: ExtraArgs = add_rl_args
) -> None:
    """Run Megatron's own validation, and make its tokenizer and the configuration of its models.

    `extra_args` adds all flags that are not Megatron's own.
    Nothing of the result is kept: Megatron does the same again when it starts, where a refusal
    would be an assertion's traceback on each rank.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import parse_args, validate_args

    saved, printed = sys.argv, io.StringIO()
    sys.argv = ["mcore_rl", *tokens]
    try:
        with (
            megatron_adapter.megatron_output_to(printed),
            contextlib.redirect_stderr(printed),  # argparse's: a flag that a fork requires
            warnings.catch_warnings(action="ignore"),
        ):
            args = parse_args(extra_args)
            validate_args(args)
            megatron_adapter.transformer_config(args)
            build_tokenizer(args)
    except (AssertionError, ValueError, RuntimeError, ImportError, OSError, SystemExit) as error:
        raise UsageError(
            f"Megatron refuses these flags ({_reason(error, printed.getvalue())}); change or drop "
            "what it speaks of"
        ) from error
    finally:
        sys.argv = saved
    if args.padded_vocab_size < shape.vocab_size:
        raise UsageError(
            f"--tokenizer-type {args.tokenizer_type} gives Megatron {args.padded_vocab_size} "
            f"tokens, but the checkpoint's vocab_size is {shape.vocab_size}; drop the flag, the "
            "checkpoint's own tokenizer is used"
        )


def _reason(error: BaseException, printed: str) -> str:
    """What Megatron said, or else printed before it left, or else the condition it asserted."""
    if isinstance(error, SystemExit):
        return next((line for line in reversed(printed.splitlines()) if line.strip()), repr(error))
    return str(error) or traceback.extract_tb(error.__traceback__)[-1].line or repr(error)
