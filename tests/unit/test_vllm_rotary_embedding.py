"""vLLM's rotary embedding on CPU, for queries and keys by head, with and without our repair."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own, because the repair stays applied; it prints the largest differences to
# the native implementation for latent attention's strided views and for plain `[t, n * d]`
# arguments.
PROBE = """
import json, sys, torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
if sys.argv[1] == "patched":
    from mcore_rl.patches.vllm import rotary_embedding_of_heads
    rotary_embedding_of_heads.apply()
torch.manual_seed(0)
with set_current_vllm_config(VllmConfig()):
    rotary = RotaryEmbedding(64, 64, 128, 10000.0, is_neox_style=False, dtype=torch.float32)
positions = torch.arange(7) + 3
found = {}
def compare(name, query, key):
    expected = rotary.forward_native(positions, query.clone(), key.clone())
    got = rotary.forward_cpu(positions, query, key)
    found[name] = max(float((a - b).abs().max()) for a, b in zip(got, expected))
by_head = torch.randn(7, 4, 192)[..., 128:], torch.randn(7, 640)[:, 576:].unsqueeze(1)
compare("by head", *by_head)
compare("flat", torch.randn(7, 4 * 64), torch.randn(7, 64))
print(json.dumps(found))
"""


def differences(variant: str) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-c", PROBE, variant], capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_heads_are_rotated_right_with_the_patch_and_wrong_without() -> None:
    assert differences("unpatched")["by head"] > 0.5
    patched = differences("patched")
    assert patched["by head"] <= 1e-5 and patched["flat"] <= 1e-5
