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


def dithered(with_remainders: bool) -> dict[str, Any]:
    """What a first step begins with: whether copies round to the parameters, and how many moved."""
    from mcore_rl.megatron.dither import dither_first_step

    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(4096, generator=generator).bfloat16())
    with standins.CudaOnMeta():
        adam = Adam(
            [parameter],
            lr=1.0,
            master_weights=True,
            use_decoupled_grad=True,
            store_param_remainders=with_remainders,
        )
    dither_first_step(adam, [(parameter, 0)])
    (begin,) = adam._optimizer_step_pre_hooks.values()
    begin(adam, (), {})
    begin(adam, (), {})  # of a later step, which changes nothing
    state = adam.state[parameter]
    copies = state["master_param"]
    if with_remainders:
        bits = parameter.detach().float().view(torch.int32) + copies.to(torch.int32)
        copies = bits.view(torch.float32)
    return {
        "dtype": str(state["master_param"].dtype),
        "rounds": torch.equal(copies.bfloat16(), parameter.detach()),
        "moved": float((copies != parameter.detach()).float().mean()),
        "moments": [float(state[name].abs().max()) for name in ("exp_avg", "exp_avg_sq")],
        "bits": copies.view(torch.int32).tolist()[:64],
    }


def main() -> None:
    found = {str(dtype): loaded(dtype) for dtype in (torch.float32, torch.bfloat16)}
    is_patched = "megatron.fused_adam_loading" in applied_patches()
    first = {name: dithered(name == "remainders") for name in ("remainders", "copies")}
    facts = {"class": Adam.__module__, "patched": is_patched, "loaded": found, "dithered": first}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
