"""What a rank does in `test_delta_net.py`; run by `tests.rank_pool`. `mamba_jobs` shares it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from mcore_rl.batching.rows import positions_on_cp_rank
from mcore_rl.megatron.adapter import packed_samples
from mcore_rl.model.boxes import slices
from mcore_rl.model.config_json import model_shape
from mcore_rl.model.weight_map import ShardCoordinates, map_parameter
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
    """Return what `compare` finds about a gated delta net."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.transformer.spec_utils import build_module

    groups = start(tp_size, cp_size)
    values = hf_config("qwen3_next", "micro") | SIZES
    peer = Qwen3NextGatedDeltaNet(AutoConfig.for_model(**values), 0)
    config = layer_config(
        groups,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=True,
        layernorm_epsilon=1e-6,
        activation_func=torch.nn.functional.silu,
        transformer_impl="local",
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=2,
        **SIZES,
    )
    spec = specs.get_gated_delta_net_module_spec(config)
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    weights = Weights("self_attention.", "model.layers.0.linear_attn.", values, groups)
    return compare(layer, peer, weights, lengths, packed)


def start(tp_size: int, cp_size: int) -> Any:
    """Start torch's and Megatron's groups and seeds; return the groups."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp_size, context_parallel_size=cp_size
    )
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(3)
    return ProcessGroupCollection.use_mpu_process_groups()


def layer_config(groups: Any, **values: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        num_attention_heads=4,
        add_bias_linear=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=groups.tp.size(),
        context_parallel_size=groups.cp.size(),
        **values,
    )


class Weights:
    """Where the weights of layer 0 are in Megatron's layer and in transformers', whose names begin
    with `here` and `there`; `values` are of config.json."""

    def __init__(self, here: str, there: str, values: dict[str, Any], groups: Any) -> None:
        self._here, self._there = f"decoder.layers.0.{here}", there
        self._shape = model_shape(values, Path("config.json"))
        self._place = ShardCoordinates(groups.tp.rank(), groups.tp.size(), 0, 1, 0, 1, layers=(0,))

    def shares(
        self, name: str, local: torch.Tensor, peer: torch.nn.Module, *, gradients: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each part of `local`, of the size of parameter `name`, with transformers' numbers."""
        for piece in map_parameter(self._here + name, local.shape, self._shape, self._place):
            weight = peer.get_parameter(piece.tensor.removeprefix(self._there))
            found = weight.grad if gradients else weight.data
            assert found is not None
            yield local[slices(piece.local_box)], found[slices(piece.checkpoint_box)]


def compare(
    layer: Any, peer: torch.nn.Module, weights: Weights, lengths: list[int], packed: bool
) -> dict[str, float]:
    """The largest differences of this rank's share to transformers' layer on each sample alone,
    relative to the largest number: of the output, and of the gradients of input and weights.

    `lengths` are of samples of one packed row, or of equal rows. Also, on one process, `unequal`:
    how many samples of the row differ in any bit from the same samples in padded rows.
    """
    for parameter in peer.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.dim() == 1 else 0.2)
    for name, parameter in layer.named_parameters():
        for mine, theirs in weights.shares(name, parameter.data, peer):
            mine.copy_(theirs)
    inputs = [torch.randn(1, length, layer.config.hidden_size) for length in lengths]
    of_outputs = [torch.randn_like(x) for x in inputs]
    alone = [x.clone().requires_grad_() for x in inputs]
    expected = [peer(x) for x in alone]
    for out, gradient in zip(expected, of_outputs, strict=True):
        out.backward(gradient)

    row = Rows(lengths, packed, layer.pg_collection)
    x = row.share(inputs).requires_grad_()
    out, _ = layer(x, None, packed_seq_params=row.samples)
    out.backward(row.share(of_outputs))
    input_gradients = [x.grad for x in alone if x.grad is not None]
    found = {
        "output": difference(out, row.share(expected)),
        "input": difference(x.grad, row.share(input_gradients)),
    }
    for name, parameter in layer.named_parameters():
        dist.all_reduce(parameter.grad, group=layer.pg_collection.cp)  # as Megatron does
        shares = weights.shares(name, parameter.grad, peer, gradients=True)
        found[name] = max(difference(mine, theirs) for mine, theirs in shares)
    if packed and dist.get_world_size() == 1:
        padded = torch.nn.utils.rnn.pad_sequence([x[0] for x in inputs], padding_value=1.0)
        of_rows, _ = layer(padded, None)
        pairs = zip(out.split(lengths), of_rows.unbind(1), lengths, strict=True)
        found["unequal"] = float(
            sum(not torch.equal(part[:, 0], full[:length]) for part, full, length in pairs)
        )
    dist.destroy_process_group()
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
