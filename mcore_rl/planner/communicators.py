"""Number of NCCL communicators of a rank, which take device memory outside of torch.

A communicator is created at the first collective of its group; a group of one rank never has one.
Its size depends on the links, its channels and the collectives, and is an assumption of the plan
(`Machine.communicator_bytes`): NVIDIA's answers give no formula but "more communicators = more
memory" (github.com/NVIDIA/nccl, issues 864, 964 and 986).

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

from mcore_rl.model.layout import RolloutLayout, TrainLayout


def communicators_of(train: TrainLayout, rollout: RolloutLayout) -> dict[str, int]:
    """Return the maximum number of a rank's communicators: Megatron's, engine's, hand-over's.

    The hand-over broadcasts in Megatron's groups. Only the plan of its moves shows whether it also
    makes a group of all ranks (`links.Traffic.num_own_groups`), so this group is counted here.
    """
    tp_ep = train.etp_size * train.ep_size
    megatron = {
        "world": train.world_size,
        "tp": train.tp_size,
        "pp": train.pp_size,
        "cp": train.cp_size,
        "dp-cp": train.dp_size * train.cp_size,
        "tp-pp": train.tp_size * train.pp_size,
        "ep": train.ep_size,
        "etp": train.etp_size if train.etp_size != train.tp_size else 1,
        "tp-ep": tp_ep if train.ep_size > 1 else 1,
        "tp-ep-pp": tp_ep * train.pp_size if train.ep_size > 1 else 1,
        "edp": train.edp_size if train.ep_size > 1 else 1,
    }
    # Each group has torch's communicator and vLLM's.
    engine = {
        "world": rollout.world_size,
        "tp": rollout.tp_size,
        "dp": rollout.dp_size,
        "ep": rollout.ep_size,
    }
    return {
        "Megatron": sum(size > 1 for size in megatron.values()),
        "engine": 2 * sum(size > 1 for size in engine.values()),
        "hand-over": int(train.world_size > 1),
    }
