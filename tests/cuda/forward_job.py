"""Runs vLLM's models for CUDA forward without data: every operator is called, none computes.

    python -m tests.cuda.forward_job '{"deepseek-v3": {"tp_size": 8, "expert_parallel": true}, ...}'

For each published config.json and layout, one rank's model of one layer of each kind, at its
published width, on FakeTensors. Operators of vLLM's libraries take their arguments by the
schemas that the libraries register. Triton compiles its kernels for them and launches none. Experts
run as one GPU runs them; attention, the core of a gated delta net and Mamba's mixer count as one
operator each. Sparse attention ends before the choice of keys, which needs metadata of a batch.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.cuda import vllm_model

vllm_model.pretend((9, 0))

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.utils.stateless import _reparametrize_module  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tests.model_shapes import CONFIGS  # noqa: E402

NUM_TOKENS = 24


class _Called(TorchDispatchMode):
    """Notes operators that are not torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prim"):
            self.names.add(func._schema.name.replace("::", "."))
        return func(*args, **(kwargs or {}))


@contextmanager
def _compiled_only() -> Iterator[Counter[str]]:
    """Within it, Triton compiles kernels for the arguments that they are given, and launches none;
    counts them by name."""
    launches: Counter[str] = Counter()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launches[self.__name__] += 1
        return run(self, *args, grid=grid, warmup=True, **options)

    with patch.object(JITFunction, "run", compile_only):
        yield launches


def run(config: str, layout: dict[str, Any], folder: Path) -> dict[str, Any]:
    published = json.loads((CONFIGS / f"{config}.json").read_text())
    model_dir = vllm_model.write_config(folder / config, shortened(published))
    with vllm_model.build(model_dir, **layout, rank=1, large_on_meta=True) as engine:
        with running(engine) as (called, launches):
            tokens = torch.empty(NUM_TOKENS, dtype=torch.long)
            hidden = engine.model(tokens, tokens.clone())
            logits = engine.model.compute_logits(hidden)
        return {
            "hidden": [list(hidden.shape), str(hidden.dtype)],
            "logits": list(logits.shape),
            "expected": [published["hidden_size"], published["vocab_size"]],
            "launches": launches,
            "operators": sorted(called.names),
        }


def shortened(published: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model with one layer of each kind, two in all; one of each letter of a
    pattern."""
    kinds: dict[str, Any] = {
        name: (list(dict.fromkeys(published[name])) * 2)[:2]
        for name in ("layer_types", "mlp_layer_types", "indexer_types")
        if name in published
    }
    others = {"first_k_dense_replace": 1, "full_attention_interval": 2, "index_skip_topk_offset": 1}
    found = {**published, "num_hidden_layers": 2, **kinds}
    found |= {name: value for name, value in others.items() if name in published}
    if pattern := published.get("hybrid_override_pattern"):
        found["hybrid_override_pattern"] = "".join(dict.fromkeys(pattern))
        found["num_hidden_layers"] = len(found["hybrid_override_pattern"])
    return found


@contextmanager
def running(engine: Any) -> Iterator[tuple[_Called, Counter[str]]]:
    """Within it, the model's weights are FakeTensors and its experts run as Python calls them."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe.runner import moe_runner
    from vllm.v1.worker.workspace import current_workspace_manager

    model = engine.model
    for module in model.modules():
        if isinstance(module, moe_runner.MoERunner):  # instead of operators that hide what is in it
            shared = module._shared_experts is not None
            module._forward_entry = (
                moe_runner._moe_forward_shared if shared else moe_runner._moe_forward
            )
    current_workspace_manager()._device = torch.device("cpu")
    with (
        # What is not among the model's parameters and buffers stays as it is: a router's bias.
        FakeTensorMode(allow_non_fake_inputs=True),
        _Called() as called,
        torch.inference_mode(),
        _compiled_only() as launches,
        set_forward_context(None, engine._vllm_config),
    ):
        tensors = [*model.named_parameters(), *model.named_buffers()]
        fake = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in tensors}
        with _reparametrize_module(model, fake, tie_weights=True):
            yield called, launches


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cases = json.loads(sys.argv[1])
        print(json.dumps({name: run(name, case, Path(folder)) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
