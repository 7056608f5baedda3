"""Where vLLM says that a rank of an engine is, for comparison with the product's layouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from vllm.distributed import parallel_state

from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Slots count engine, then DP rank, then TP rank, innermost. Without EP, `ep_size` is 1."""

    slot: int
    tp_rank: int
    dp_rank: int
    ep_rank: int
    ep_size: int
    engine_index: int
    num_engines: int

    @classmethod
    def of(cls, engine: VLLMEngine) -> EnginePlace:
        config, slots = engine._vllm_config, engine.config.slots_per_engine
        slot = engine.config.slot(dist.get_rank())
        has_ep = config.parallel_config.enable_expert_parallel and config.model_config.is_moe
        return cls(
            slot=slot,
            tp_rank=engine.tp_rank,
            dp_rank=parallel_state.get_dp_group().rank_in_group,
            ep_rank=parallel_state.get_ep_group().rank_in_group if has_ep else 0,
            ep_size=parallel_state.get_ep_group().world_size if has_ep else 1,
            engine_index=slot // slots,
            num_engines=parallel_state.get_world_group().world_size // slots,
        )
