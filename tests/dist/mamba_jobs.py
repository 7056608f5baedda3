"""What a rank does in `test_local_mamba.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from tests.dist.delta_net_jobs import Rows, difference

HIDDEN, HEADS, HEAD, GROUPS, STATE, WIDTH = 96, 32, 6, 4, 16, 4


def compare_with_transformers(
    lengths: list[int], *, packed: bool, tp_size: int = 1, cp_size: int = 1
) -> dict[str, float]:
    """As `delta_net_jobs.compare_with_transformers`, of Mamba-2 layers."""
    layer, peer = _layers(tp_size, cp_size)
    inputs = [torch.randn(1, length, HIDDEN) for length in lengths]
    of_outputs = [torch.randn_like(x) for x in inputs]
    alone = [x.clone().requires_grad_() for x in inputs]
    expected = [peer(x) for x in alone]
    for out, gradient in zip(expected, of_outputs, strict=True):
        out.backward(gradient)

    row = Rows(lengths, packed, layer.pg_collection)
    mine = row.share(inputs).requires_grad_()
    out, _ = layer(mine, packed_seq_params=row.samples)
    out.backward(row.share(of_outputs))
    found = {
        "output": difference(out, row.share(expected)),
        "input": difference(mine.grad, row.share([x.grad for x in alone if x.grad is not None])),
    }
    for name, parameter in layer.named_parameters():
        dist.all_reduce(parameter.grad, group=layer.pg_collection.cp)
        share = _share(name, peer, layer.pg_collection.tp, gradient=True)
        found[name] = difference(parameter.grad, share)
    if packed and dist.get_world_size() == 1:
        padded = torch.nn.utils.rnn.pad_sequence([x[0] for x in inputs], padding_value=1.0)
        of_rows, _ = layer(padded)
        pairs = zip(out.split(lengths), of_rows.unbind(1), lengths, strict=True)
        found["unequal"] = float(
            sum(not torch.equal(part[:, 0], full[:length]) for part, full, length in pairs)
        )
    dist.destroy_process_group()
    return found


def _layers(tp_size: int, cp_size: int) -> tuple[Any, torch.nn.Module]:
    """Megatron's layer and transformers', with the same weights."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        model_parallel_cuda_manual_seed,
    )
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp_size, context_parallel_size=cp_size
    )
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(3)
    values = AutoConfig.for_model(
        "nemotron_h",
        hidden_size=HIDDEN,
        mamba_num_heads=HEADS,
        mamba_head_dim=HEAD,
        n_groups=GROUPS,
        ssm_state_size=STATE,
        conv_kernel=WIDTH,
        layer_norm_epsilon=1e-5,
        time_step_min=0.0,  # Megatron and vLLM do not limit time steps
        layers_block_type=["mamba"] * 2,
    )
    peer = NemotronHMamba2Mixer(values, 0)
    for weight in peer.parameters():
        torch.nn.init.normal_(weight, std=0.5 if weight.dim() == 1 else 0.2)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        add_bias_linear=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp_size,
        context_parallel_size=cp_size,
        mamba_num_heads=HEADS,
        mamba_head_dim=HEAD,
        mamba_num_groups=GROUPS,
        mamba_state_dim=STATE,
    )
    layer = MambaMixer(
        config,
        MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        HIDDEN,
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(_share(name, peer, layer.pg_collection.tp))
    return layer, peer


INNER = HEADS * HEAD
# Rows of each part that TP cuts: z, x, B, C, dt.
PARTS = {
    "in_proj.weight": (INNER, INNER, GROUPS * STATE, GROUPS * STATE, HEADS),
    **dict.fromkeys(("conv1d.weight", "conv1d.bias"), (INNER, GROUPS * STATE, GROUPS * STATE)),
}


def _share(name: str, peer: torch.nn.Module, tp: Any, *, gradient: bool = False) -> torch.Tensor:
    """This TP rank's part of transformers' weight, or of its gradient."""
    name = name.replace("conv1d_", "conv1d.")
    weight = peer.get_parameter(name)
    whole = weight.grad if gradient else weight.data
    assert whole is not None
    if name == "out_proj.weight":
        return whole.chunk(tp.size(), dim=1)[tp.rank()]
    parts = whole.split(PARTS.get(name, (len(whole),)))
    return torch.cat([part.chunk(tp.size())[tp.rank()] for part in parts])
