"""Experts of a model and the layers that have them, read from a config.json."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.common.parameters import Bounds
from mcore_rl.model.config_fields import Fields
from mcore_rl.model.family import Family, Router
from mcore_rl.model.mamba import EXPERTS


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture-of-experts part of a model."""

    num_experts: int
    topk: int
    hidden_size: int  # one routed expert
    shared_hidden_size: int | None  # all shared experts together
    score_function: str  # "sigmoid" or "softmax"
    has_bias: bool  # auxiliary-loss-free balancing, arXiv 2408.15664
    normalize_topk: bool
    scaling_factor: float
    num_groups: int | None
    topk_groups: int | None
    has_shared_gate: bool = False  # the shared expert's output is scaled by a sigmoid of its input

    @property
    def ranks_groups_by_best(self) -> bool:
        """Whether a group is ranked by its best expert (DeepSeek-V2), not by its best two (V3)."""
        return self.num_groups is not None and self.score_function == "softmax"


def read_experts(fields: Fields, router: Router) -> Experts:
    """Read the experts from config.json, using the field names of the family's router."""
    normalize = router.always_normalizes or fields.switch("norm_topk_prob")
    topk, hidden_size = fields.count("num_experts_per_tok"), fields.count(router.expert_size)
    method, is_sigmoid = "", router.score_function == "sigmoid"
    if router.methods:
        method = _routing_method(fields, router)
        if is_sigmoid and not normalize:
            raise fields.refuse("norm_topk_prob false with a sigmoid router")
        if not is_sigmoid and normalize and topk > 1:
            raise fields.refuse("norm_topk_prob true with model_type 'deepseek_v2'")
    num_groups, topk_groups = _expert_groups(fields, method, topk) if method else (None, None)
    return Experts(
        num_experts=_num_experts(fields, router),
        topk=topk,
        hidden_size=hidden_size,
        shared_hidden_size=_shared_size(fields, router, hidden_size) or None,
        score_function=router.score_function,
        has_bias=is_sigmoid,
        normalize_topk=normalize,
        scaling_factor=(
            fields.number(router.scaling_factor, 1.0, bounds=Bounds(above=0)) if method else 1.0
        ),
        num_groups=num_groups,
        topk_groups=topk_groups,
        has_shared_gate=router.gated_shared_size is not None,
    )


def _shared_size(fields: Fields, router: Router, hidden_size: int) -> int:
    """Return the hidden size of all shared experts together; `hidden_size` is per routed expert."""
    if name := router.gated_shared_size or router.shared_size:
        return fields.count(name)
    return fields.count(router.shared_experts, 0, least=0) * hidden_size if router.methods else 0


def _num_experts(fields: Fields, router: Router) -> int:
    """Return the number of experts, from the published field or the one transformers 5 saves."""
    published, saved = router.num_experts, router.also_called
    if saved is None or fields.get(saved) is None:
        return fields.count(published)
    count = fields.count(saved)
    if fields.count(published, count) != count:
        raise fields.refuse(
            f"both {published} {fields[published]} and {saved} {count}",
            "take out the one that the weights do not have",
        )
    return count


def _routing_method(fields: Fields, router: Router) -> str:
    """Return DeepSeek's topk_method; refuse it or scoring_func if the family has another."""
    of_family = f"with model_type '{fields['model_type']}'"
    scoring = fields.get("scoring_func", router.score_function)
    if scoring != router.score_function:
        raise fields.refuse(f"scoring_func '{scoring}' {of_family}")
    method = str(fields.get("topk_method", router.methods[0]))
    if method not in router.methods:
        raise fields.refuse(f"topk_method '{method}' {of_family}")
    return method


def _expert_groups(fields: Fields, method: str, topk: int) -> tuple[int | None, int | None]:
    """Return the number of groups and the groups a token may use; None without group limits."""
    num_groups = fields.count("n_group", 1 if method != "group_limited_greedy" else None)
    if num_groups == 1:
        return None, None
    if method == "greedy":
        raise fields.refuse(f"n_group {num_groups} with topk_method 'greedy'")
    topk_groups = fields.count("topk_group")
    # A group is ranked by its best experts: DeepSeek-V3 adds the best two, Megatron the best
    # topk // topk_group. V2 takes the best one; one of our patches makes Megatron do so, too.
    added = topk // topk_groups
    if method == "noaux_tc" and added != 2:
        raise fields.refuse(
            f"group-limited routing with num_experts_per_tok {topk} and topk_group {topk_groups} "
            f"(Megatron would rank a group by its best {added} experts)"
        )
    return num_groups, topk_groups


def moe_layers(
    fields: Fields, family: Family, num_layers: int, blocks: str = ""
) -> tuple[bool, ...]:
    """Return for each layer whether it has experts; a missing field keeps no layer dense. `blocks`
    are the symbols of layers that have one block each."""
    if blocks:
        return tuple(block == EXPERTS for block in blocks)
    if family.router is None:
        return (False,) * num_layers
    first = _first_with_experts(fields, family.router, num_layers)
    frequency = fields.count("moe_layer_freq", 1)
    step = fields.count("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise fields.invalid("mlp_only_layers", dense, "a list")
    return tuple(
        i >= first and i % frequency == 0 and (i + 1) % step == 0 and i not in dense
        for i in range(num_layers)
    )


def _first_with_experts(fields: Fields, router: Router, num_layers: int) -> int:
    """Return the number of dense layers at the front."""
    types = fields.get(router.layer_types) if router.layer_types else None
    if types is None:
        # Without the types transformers keeps one layer dense.
        return fields.count("first_k_dense_replace", None if router.layer_types else 0, least=0)
    types = list(types) if isinstance(types, list) else [types]
    first = fields.count("first_k_dense_replace", types.count("dense"), least=0)
    if types != ["dense"] * first + ["sparse"] * (num_layers - first):
        raise fields.refuse(
            f"{router.layer_types} other than {first} dense layers and then "
            f"{num_layers - first} sparse ones (vLLM reads first_k_dense_replace)"
        )
    return first
