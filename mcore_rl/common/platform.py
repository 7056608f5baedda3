"""The machine's support for Megatron: a GPU, Transformer Engine, Apex's kernels.

It is detected once, by importing, since an installed package need not be importable.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from dataclasses import dataclass, replace

from mcore_rl.common.errors import UsageError

# Without a GPU, the gradients of samples with fewer keys are computed faster in float32: 14 ms
# instead of 24, forward pass included, for 47 x 9 heads with 25 queries and 73 keys, on a CPU with
# AVX512_BF16. From 512 keys torch's kernel is faster in 16 bits.
MOST_KEYS_IN_FLOAT32 = 256

# Apex's extension, the only part of Apex that Megatron's output layer can use.
WEIGHT_GRADIENTS = "fused_weight_gradient_mlp_cuda"


@dataclass(frozen=True, slots=True)
class Platform:
    """The packages that are available. Without `cuda` the next two fields do not matter."""

    cuda: bool
    transformer_engine: tuple[int, ...] | None = None  # (2, 20, 2); None: cannot be imported
    fused_weight_gradients: bool = False  # WEIGHT_GRADIENTS can be imported
    emerging_optimizers: bool = True  # Muon, Lion and others can be imported

    @property
    def lacks(self) -> str:
        """The missing packages that Megatron's defaults need, in words; "" if none is missing."""
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
    """Return this machine's platform. Raises UsageError if Transformer Engine is broken."""
    import torch

    emerging_optimizers = _can_import("emerging_optimizers")
    if not torch.cuda.is_available():
        return replace(WITHOUT_CUDA, emerging_optimizers=emerging_optimizers)
    return Platform(
        cuda=True,
        transformer_engine=_transformer_engine(),
        fused_weight_gradients=_can_import(WEIGHT_GRADIENTS),
        emerging_optimizers=emerging_optimizers,
    )


def _transformer_engine() -> tuple[int, ...] | None:
    if not _can_import("transformer_engine"):
        return None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # parts of Megatron only check the package, and crash on the rest
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
