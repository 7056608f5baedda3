"""Transformer Engine's Adam as Megatron takes it, loading states of CPU tensors.

python -m tests.cuda.adam_job
"""

from __future__ import annotations

import json
from typing import Any

from tests.cuda import megatron_models, standins

megatron_models.prepare(transformer_engine=True)

import torch  # noqa: E402
from megatron.core.optimizer import Adam  # noqa: E402

from mcore_rl.patches.registry import applied_patches  # noqa: E402

SIZES = (5, 3)
VALUES = {"exp_avg": 0.5, "exp_avg_sq": 0.25}


def loaded(dtype: torch.dtype) -> dict[str, Any]:
    """What the optimizer holds after it was given float32 moments; `dtype` is that of its own."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    with standins.CudaOnMeta():
        adam = Adam(parameters, lr=1.0, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    given = {
        i: {name: torch.full((size,), value) for name, value in VALUES.items()}
        for i, size in enumerate(SIZES)
    }
    group = {**adam.state_dict()["param_groups"][0], "step": 7, "lr": 0.125}
    adam.load_state_dict({"state": given, "param_groups": [group]})
    held = [adam.state[parameter] for parameter in parameters]
    return {
        "values": [{name: tensor.tolist() for name, tensor in state.items()} for state in held],
        "dtypes": sorted({str(tensor.dtype) for state in held for tensor in state.values()}),
        "is_copied": any(
            held[i][name] is not tensor
            for i, state in given.items()
            for name, tensor in state.items()
        ),
        "group": {name: adam.param_groups[0][name] for name in ("step", "lr")},
        "same_parameters": all(
            one is other
            for one, other in zip(adam.param_groups[0]["params"], parameters, strict=True)
        ),
    }


def main() -> None:
    found = {str(dtype): loaded(dtype) for dtype in (torch.float32, torch.bfloat16)}
    is_patched = "megatron.fused_adam_loading" in applied_patches()
    print(json.dumps({"class": Adam.__module__, "patched": is_patched, "loaded": found}))


if __name__ == "__main__":
    main()
