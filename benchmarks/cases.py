"""Models and pairs of layouts of the resharding benchmark. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Sizes in config.json that replace those of scripts/make_tiny_deepseek.py. The vocabulary needs no
# padding under any degree, so that the lower bound is the formula's.
_DENSE = dict(
    vocab_size=8192, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8,
    num_attention_heads=16, num_key_value_heads=8, head_dim=64,
)  # fmt: skip
# Fewer layers of larger tensors: 8 to 28 MB each on a TP rank, as in large models. The cost per
# tensor is then negligible.
_LARGE = dict(
    vocab_size=8192, hidden_size=3072, intermediate_size=9216, num_hidden_layers=2,
    num_attention_heads=24, num_key_value_heads=8, head_dim=128,
)  # fmt: skip
_MOE = dict(
    vocab_size=8192, hidden_size=512, intermediate_size=1024, moe_intermediate_size=512,
    num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, q_lora_rank=128,
    n_routed_experts=16,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint of random bf16 weights: family, named size, and overrides of config.json."""

    name: str
    arch: str
    size: str = "small"
    overrides: Mapping[str, Any] = field(default_factory=dict)


DENSE = Model("qwen3 (dense)", "qwen3", overrides=_DENSE)
LARGE = Model("qwen3 (large tensors)", "qwen3", overrides=_LARGE)
MOE = Model("deepseek_v3 (MoE)", "deepseek_v3", overrides=_MOE)
TINY = Model("qwen3 (tiny)", "qwen3", "tiny", dict(vocab_size=1024, num_key_value_heads=4))


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one pair of layouts: training TP x PP x EP, rollout engines of TP' x DP'."""

    model: Model
    world_size: int
    tp_size: int
    pp_size: int
    ep_size: int = 1
    rollout_tp_size: int = 1
    rollout_dp_size: int = 1

    @property
    def expert_parallel(self) -> bool:
        return self.ep_size > 1

    @property
    def layout(self) -> str:
        """TP2 PP2 EP4 -> TP2 DP2 EP4 on 8."""
        train = f"TP{self.tp_size} PP{self.pp_size}"
        rollout = f"TP{self.rollout_tp_size}"
        if self.expert_parallel:
            train += f" EP{self.ep_size}"
            if self.rollout_dp_size > 1:
                rollout += f" DP{self.rollout_dp_size}"
            rollout += f" EP{self.rollout_tp_size * self.rollout_dp_size}"
        return f"{train} -> {rollout} on {self.world_size}"

    def flags(self, checkpoint: str, bucket_mb: int) -> list[str]:
        """Return the command line of a run in this layout."""
        return [
            *("--rl-hf-checkpoint", checkpoint),
            *("--rl-model-class", "gpt"),  # whose names mbridge knows
            *("--rl-num-prompts-per-step", "8", "--rl-num-samples-per-prompt", "2"),
            *("--rl-max-prompt-tokens", "32", "--rl-max-response-tokens", "32"),
            *("--rl-reshard-bucket-mb", str(bucket_mb)),
            *("--tensor-model-parallel-size", str(self.tp_size)),
            *("--pipeline-model-parallel-size", str(self.pp_size)),
            *("--expert-model-parallel-size", str(self.ep_size)),
        ]


CASES = (
    Case(DENSE, 4, tp_size=2, pp_size=2, rollout_tp_size=2),
    Case(DENSE, 4, tp_size=2, pp_size=2, rollout_tp_size=4),
    Case(LARGE, 4, tp_size=2, pp_size=2, rollout_tp_size=2),
    Case(MOE, 4, tp_size=2, pp_size=2, ep_size=2, rollout_tp_size=2),
    Case(MOE, 8, tp_size=2, pp_size=2, ep_size=4, rollout_tp_size=2, rollout_dp_size=2),
)
QUICK = (Case(TINY, 4, tp_size=2, pp_size=2, rollout_tp_size=4),)
