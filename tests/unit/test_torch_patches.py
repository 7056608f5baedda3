"""16-bit products in float32: the numbers of every operator, and that nothing else changes.

In another process, because a patch stays applied; independent of this machine's CPU.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mcore_rl.patches.torch import narrow_products

SAME_NUMBERS = """
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from mcore_rl.patches.registry import apply_patch
from mcore_rl.patches.torch import narrow_products

generator = torch.Generator().manual_seed(1)
wide = {
    name: torch.randn(shape, generator=generator)
    for name, shape in {
        "rows": (5, 7), "columns": (7, 3), "bias": (3,), "weight": (3, 7), "many": (2, 5, 7),
        "others": (2, 7, 3), "sums": (2, 5, 3), "queries": (2, 2, 6, 8), "keys": (2, 2, 6, 8),
    }.items()
}


def results(tensors):
    # Every operator, the forms that write into a tensor, and what autograd makes of them.
    t = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    found = {
        "mm": t["rows"] @ t["columns"],
        "addmm": linear(t["rows"], t["weight"], t["bias"]),
        "bmm": t["many"] @ t["others"],
        "baddbmm": torch.baddbmm(t["sums"], t["many"], t["others"], beta=0.5, alpha=2.0),
        "einsum": torch.einsum("bij,bjk->ik", t["many"], t["others"]),
        "attention": scaled_dot_product_attention(
            t["queries"], t["keys"], t["keys"], is_causal=True
        ),
        "masked": scaled_dot_product_attention(
            t["queries"], t["keys"], t["keys"], scale=0.1,
            attn_mask=torch.zeros(6, 6, dtype=t["keys"].dtype),
        ),
    }
    sum(value.float().square().sum() for value in found.values()).backward()
    found |= {f"gradient of {name}": tensor.grad for name, tensor in t.items()}
    with torch.inference_mode():
        dtype = tensors["rows"].dtype
        found["mm.out"] = torch.empty(5, 3, dtype=dtype)
        assert torch.mm(tensors["rows"], tensors["columns"], out=found["mm.out"]) is found["mm.out"]
        found["addmm.out"] = torch.addmm(
            tensors["bias"], tensors["rows"], tensors["columns"],
            out=torch.empty(0, dtype=dtype),
        )
        into = torch.empty(5, 2, 3, dtype=dtype)  # a view, as the engine's attention has one
        torch.bmm(tensors["many"], tensors["others"], out=into.transpose(0, 1))
        found["bmm.out"] = into
    return {name: value.detach() for name, value in found.items()}


def conversions(left, right):
    with torch.autograd.profiler.profile() as profile:
        left @ right
    return sum(event.name == "aten::_to_copy" for event in profile.function_events)


narrow_products.slow_dtypes = lambda: frozenset({torch.bfloat16, torch.float16})
before = results(wide)
assert narrow_products.needed() and apply_patch(narrow_products.PATCH)
after = results(wide)
assert all(torch.equal(before[name], after[name]) for name in before), "float32 changed"
assert conversions(wide["rows"], wide["columns"]) == 0
for dtype, one_rounding in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
    narrow = {name: tensor.to(dtype) for name, tensor in wide.items()}
    assert conversions(narrow["rows"], narrow["columns"]) == 3, "not computed in float32"
    exact = results({name: tensor.double() for name, tensor in narrow.items()})
    for name, value in results(narrow).items():
        assert value.dtype == dtype, name
        # A gradient is one of a rounded output, and a sum of several rounded products.
        roundings = 8 if "gradient" in name else 1.01
        close = (value.double() - exact[name]).abs().max() / exact[name].abs().max()
        assert close < roundings * one_rounding, (dtype, name, float(close))
        if name in ("mm", "bmm", "mm.out", "bmm.out"):
            assert torch.equal(value, exact[name].float().to(dtype)), name
print("same")
"""


@pytest.mark.parametrize(
    ("has", "is_slow"),
    [
        ("avx512_f", True),
        ("avx512_f avx512_bf16", False),
        ("avx512_f amx_bf16", False),
        ("", False),
    ],
)
def test_emulated_products_are_slow(has, is_slow, monkeypatch):
    """oneDNN multiplies on all of these CPUs; the last one is not an x86."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(has.split(), True))
    supports = SimpleNamespace(
        _is_mkldnn_bf16_supported=lambda: True, _is_mkldnn_fp16_supported=lambda: True
    )
    monkeypatch.setattr(torch.ops, "mkldnn", supports)
    assert narrow_products.slow_dtypes() == ({torch.bfloat16} if is_slow else set())


def test_narrow_products_are_those_of_float32_rounded_once():
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", SAME_NUMBERS],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "same"
