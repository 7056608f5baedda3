"""The indexers of sparse attention (DSA) in Megatron models: frozen unless they are trained.

The choice of keys has no gradient, so the policy's loss does not train an indexer. GLM-5 (arXiv
2602.15763) freezes it in RL, which is the default here. DeepSeek-V3.2 (arXiv 2512.02556) trains it
by a KL divergence to the attention's own weights: `--dsa-indexer-loss-coeff`.
"""

from __future__ import annotations

from typing import Any

import torch


def freeze_indexers(model: torch.nn.Module) -> None:
    """Exclude the model's indexers from training, unless its configuration has their loss.

    Without gradients alone AdamW's weight decay would still change them.
    """
    config: Any = model.config
    if getattr(config, "dsa_indexer_loss_coeff", None):
        return
    for name, parameter in model.named_parameters():
        if ".core_attention.indexer." in name:
            parameter.requires_grad_(False)
