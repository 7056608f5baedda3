"""What a rank does in `test_local_mamba.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from transformers import AutoConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from scripts.make_tiny_deepseek import hf_config
from tests.dist.delta_net_jobs import Weights, compare, layer_config, start

SIZES = {
    "hidden_size": 96,
    "mamba_num_heads": 32,
    "mamba_head_dim": 6,
    "n_groups": 4,
    "ssm_state_size": 16,
}


def compare_with_transformers(
    lengths: list[int], *, packed: bool, tp_size: int = 1, cp_size: int = 1
) -> dict[str, float]:
    """Return what `compare` finds about a Mamba-2 layer."""
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    groups = start(tp_size, cp_size)
    # Megatron and vLLM do not limit time steps.
    values = hf_config("nemotron_h", "micro") | SIZES | {"time_step_min": 0.0}
    peer = NemotronHMamba2Mixer(AutoConfig.for_model(**values), 0)
    config = layer_config(
        groups,
        hidden_size=SIZES["hidden_size"],
        mamba_num_heads=SIZES["mamba_num_heads"],
        mamba_head_dim=SIZES["mamba_head_dim"],
        mamba_num_groups=SIZES["n_groups"],
        mamba_state_dim=SIZES["ssm_state_size"],
    )
    linear = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    layer = MambaMixer(config, linear, config.hidden_size, layer_number=1, pg_collection=groups)
    weights = Weights("mixer.", "backbone.layers.0.mixer.", values, groups)
    return compare(layer, peer, weights, lengths, packed)
