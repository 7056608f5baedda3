"""What a rank does in `test_delta_net.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from mcore_rl.batching.rows import positions_on_cp_rank
from mcore_rl.megatron.adapter import packed_samples
from mcore_rl.model.boxes import slices
from mcore_rl.model.config_json import ModelShape, model_shape
from mcore_rl.model.weight_map import Piece, ShardCoordinates, map_parameter
from scripts.make_tiny_deepseek import hf_config

# Few are powers of two. Heads and widths are of whole vectors, because torch computes what is left
# over in another way, and that depends on the number of positions.
SIZES = {
    "hidden_size": 96,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
}


def compare_with_transformers(
    lengths: list[int], *, packed: bool, tp_size: int = 1, cp_size: int = 1
) -> dict[str, float]:
    """The largest differences of this rank's share to transformers' layer on each sample alone,
    relative to the largest number: of the output, and of the gradients of input and weights.

    `lengths` are of samples of one packed row, or of equal rows. Also, on one process, `unequal`:
    how many samples of the row differ in any bit from the same samples in padded rows.
    """
    layer, peer, place = _layers(tp_size, cp_size)
    config = layer.config
    inputs = [torch.randn(1, length, config.hidden_size) for length in lengths]
    of_outputs = [torch.randn_like(x) for x in inputs]
    alone = [x.clone().requires_grad_() for x in inputs]
    expected = [peer(x) for x in alone]
    for out, gradient in zip(expected, of_outputs, strict=True):
        out.backward(gradient)

    row = Rows(lengths, packed, layer.pg_collection)
    mine = row.share(inputs).requires_grad_()
    out, _ = layer(mine, None, packed_seq_params=row.samples)
    out.backward(row.share(of_outputs))
    input_gradients = [x.grad for x in alone if x.grad is not None]
    found = {
        "output": difference(out, row.share(expected)),
        "input": difference(mine.grad, row.share(input_gradients)),
        **_of_weights(layer, peer, place),
    }
    if packed and dist.get_world_size() == 1:
        padded = torch.nn.utils.rnn.pad_sequence([x[0] for x in inputs], padding_value=1.0)
        of_rows, _ = layer(padded, None)
        pairs = zip(out.split(lengths), of_rows.unbind(1), lengths, strict=True)
        found["unequal"] = float(
            sum(not torch.equal(row[:, 0], full[:length]) for row, full, length in pairs)
        )
    dist.destroy_process_group()
    return found


def _layers(
    tp_size: int, cp_size: int
) -> tuple[Any, torch.nn.Module, tuple[ModelShape, ShardCoordinates]]:
    """Megatron's layer and transformers', with the same weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp_size, context_parallel_size=cp_size
    )
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(3)
    values = hf_config("qwen3_next", "micro") | SIZES
    peer = Qwen3NextGatedDeltaNet(AutoConfig.for_model(**values), 0)
    for weight in peer.parameters():
        torch.nn.init.normal_(weight, std=0.5 if weight.dim() == 1 else 0.2)
    config = TransformerConfig(
        num_layers=2,
        num_attention_heads=4,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=True,
        layernorm_epsilon=1e-6,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        transformer_impl="local",
        tensor_model_parallel_size=tp_size,
        context_parallel_size=cp_size,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=2,
        **SIZES,
    )
    layer = build_module(
        specs.get_gated_delta_net_module_spec(config),
        config=config,
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    shape = model_shape(values, Path("config.json"))
    rank = parallel_state.get_tensor_model_parallel_rank()
    place = (shape, ShardCoordinates(rank, tp_size, 0, 1, 0, 1, layers=(0,)))
    for name, parameter in layer.named_parameters():
        for piece in _pieces(name, parameter, place):
            parameter.data[slices(piece.local_box)] = _of_peer(peer, piece)
    return layer, peer, place


def _pieces(
    name: str, parameter: torch.Tensor, place: tuple[ModelShape, ShardCoordinates]
) -> tuple[Piece, ...]:
    return map_parameter(f"decoder.layers.0.self_attention.{name}", parameter.shape, *place)


def _of_peer(peer: torch.nn.Module, piece: Piece, *, gradient: bool = False) -> torch.Tensor:
    weight = peer.get_parameter(piece.tensor.removeprefix("model.layers.0.linear_attn."))
    found = weight.grad if gradient else weight.data
    assert found is not None
    return found[slices(piece.checkpoint_box)]


def _of_weights(
    layer: Any, peer: torch.nn.Module, place: tuple[ModelShape, ShardCoordinates]
) -> dict[str, float]:
    """Differences of gradients, which Megatron sums over CP."""
    found = {}
    for name, parameter in layer.named_parameters():
        dist.all_reduce(parameter.grad, group=layer.pg_collection.cp)
        found[name] = max(
            difference(
                parameter.grad[slices(piece.local_box)], _of_peer(peer, piece, gradient=True)
            )
            for piece in _pieces(name, parameter, place)
        )
    return found


def difference(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert found is not None
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


class Rows:
    """Samples as Megatron's rows, `[s, b, h]`, and a rank's share of them."""

    def __init__(self, lengths: list[int], packed: bool, groups: Any) -> None:
        self._packed = packed
        bounds = torch.tensor([0, *lengths] if packed else [0, lengths[0]]).cumsum(0).int()
        self.samples = packed_samples(bounds if packed else None, max(lengths))
        self._mine = positions_on_cp_rank(
            bounds,
            int(bounds[-1]) // groups.cp.size(),
            cp_size=groups.cp.size(),
            cp_rank=groups.cp.rank(),
        )

    def share(self, samples: list[torch.Tensor]) -> torch.Tensor:
        rows = torch.cat(samples, dim=1 if self._packed else 0).transpose(0, 1)
        return rows[self._mine].detach().clone()
