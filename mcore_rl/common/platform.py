"""What this machine has for Megatron to run with: a GPU, Transformer Engine, Apex's kernels.

Found once, by importing, and handed to every check: a flag's default asks for kernels of a package
that may not be there, and what is installed need not be importable.

This module is pure: it imports torch and the packages it looks for only when it looks.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from dataclasses import dataclass

from mcore_rl.common.errors import UsageError

# Apex's, the only part of it that Megatron's output layer can use.
WEIGHT_GRADIENTS = "fused_weight_gradient_mlp_cuda"


@dataclass(frozen=True, slots=True)
class Platform:
    """What there is. Without `cuda` nothing else counts."""

    cuda: bool
    transformer_engine: tuple[int, ...] | None = None  # (2, 20, 2); None: cannot be imported
    fused_weight_gradients: bool = False  # WEIGHT_GRADIENTS can be imported

    @property
    def lacks(self) -> str:
        """What Megatron's defaults ask for and is not here, in words; "" if nothing."""
        if not self.cuda:
            return "CUDA"
        missing = {
            "Transformer Engine": self.transformer_engine is None,
            "Apex's fused weight gradients": not self.fused_weight_gradients,
        }
        return " and ".join(name for name, is_missing in missing.items() if is_missing)


WITHOUT_CUDA = Platform(cuda=False)


@functools.cache
def find_platform() -> Platform:
    """This machine's. UsageError: Transformer Engine is broken in a way that Megatron dies of."""
    import torch

    if not torch.cuda.is_available():
        return WITHOUT_CUDA
    return Platform(
        cuda=True,
        transformer_engine=_transformer_engine(),
        fused_weight_gradients=_can_import(WEIGHT_GRADIENTS),
    )


def _transformer_engine() -> tuple[int, ...] | None:
    if not _can_import("transformer_engine"):
        return None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # parts of Megatron go by the package alone, and die of the rest
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"Transformer Engine is installed and cannot be imported ({reason})",
            remedy="run scripts/setup_env.sh, or uninstall it to train with --transformer-impl "
            "local",
        ) from error
    version = importlib.metadata.version("transformer-engine")
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _can_import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
