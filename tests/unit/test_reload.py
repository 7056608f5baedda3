"""Failures of a reload; successful reloads are in tests/dist."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.vllm.reload import Reloader, load_together


class Failing(Reloader):
    """Its loader fails at the first tensor."""

    def load(self, weights: Any, on_write: Any = None) -> list[str]:
        next(weights)
        raise RuntimeError("the loader failed")


@pytest.mark.parametrize("stream_fails", [False, True])
def test_loader_failure_is_reported_after_the_stream_has_ended(stream_fails):
    asked: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("first", "second", "third"):  # collective: the others send all of it
            asked.append(name)
            if name == "third" and stream_fails:
                raise RuntimeError("a rank could not send")
            yield name, torch.zeros(1)

    alone = SimpleNamespace(ranks=[0])
    with pytest.raises(RuntimeError, match="^the loader failed$"):
        load_together(Failing(torch.nn.Module(), None).load, stream(), group=alone)
    assert asked == ["first", "second", "third"]


def test_kernels_with_other_weight_layouts_are_refused_by_name():
    model = torch.nn.ModuleDict({"experts": torch.nn.Module()})
    model["experts"].quant_method = SimpleNamespace(
        unquantized_backend=SimpleNamespace(name="AITER")
    )
    with pytest.raises(UsageError, match="the AITER kernels for the experts of experts.* TRITON"):
        Reloader(model, None)
