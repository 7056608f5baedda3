"""What a reload tells the engine's other ranks when it fails; reloads are in tests/dist."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.vllm import reload as reload_module
from mcore_rl.hybrid_engine.vllm.reload import Reloader


class Failing(Reloader):
    """Takes one tensor, and has a loader that fails at it."""

    def load(self, weights: Any, on_write: Any = None) -> list[str]:
        next(weights)
        raise RuntimeError("the loader failed")


@pytest.mark.parametrize("stream_fails", [False, True])
def test_a_loader_that_fails_is_told_to_all_after_the_stream_has_ended(
    stream_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    told: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("first", "second", "third"):  # collective: the others wait for all of it
            asked.append(name)
            if name == "third" and stream_fails:
                raise RuntimeError("a rank could not send")
            yield name, torch.zeros(1)

    def agree(group: Any, fault: Exception | None, unread: list[str]) -> None:
        told.append(str(fault))

    monkeypatch.setattr(reload_module, "_agree", agree)
    Failing(torch.nn.Module(), None).reload(stream(), group=None)
    assert asked == ["first", "second", "third"]
    assert told == ["the loader failed"]


def test_kernels_whose_weights_cannot_be_exchanged_are_refused_by_name() -> None:
    model = torch.nn.ModuleDict({"experts": torch.nn.Module()})
    model["experts"].quant_method = SimpleNamespace(
        unquantized_backend=SimpleNamespace(name="AITER")
    )
    with pytest.raises(UsageError, match="the AITER kernels for the experts of experts.* TRITON"):
        Reloader(model, None)
