"""What vLLM lacks for gpt-oss beside a trainer: with our repair it has it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own, because the repair stays applied; it prints what happens before and after
# it is. The layers of a block are left out: what is looked at is written around them.
PROBE = """
import json, torch
from types import SimpleNamespace as Named
from vllm.model_executor.models import gpt_oss
from mcore_rl.patches.registry import apply_patch
from mcore_rl.patches.vllm import experts_one_by_one

gpt_oss.GateLinear = gpt_oss.FusedMoEFactory = lambda *args, **kwargs: None
torch.distributed.is_initialized = lambda: True
torch.distributed.get_world_size = lambda: 7
config = Named(num_local_experts=4, hidden_size=8, num_experts_per_tok=2, intermediate_size=96)
parallel = Named(use_sequence_parallel_moe=False)
whole = Named(model_config=Named(hf_config=config), quant_config=None, lora_config=None,
              parallel_config=parallel)

class Model(gpt_oss.GptOssModel):
    def __init__(self):
        torch.nn.Module.__init__(self)
        self.config = Named(quantization_config=None, num_attention_heads=2, num_local_experts=4)
        self.parallel_config = Named(enable_expert_parallel=True)

gpt_oss.get_tensor_model_parallel_rank = lambda: 0
gpt_oss.get_tensor_model_parallel_world_size = lambda: 1
gpt_oss.get_ep_group = lambda: Named(world_size=1, rank_in_group=0)
Model._load_weights_other = lambda *args: "loaded"

def tried(function):
    try:
        return str(function())
    except Exception as error:
        return type(error).__name__

def seen():
    return [tried(lambda: gpt_oss.MLPBlock(whole, 0)), tried(lambda: Model().load_weights([]))]

print(json.dumps(seen()))
assert apply_patch(experts_one_by_one.PATCH)
print(json.dumps(seen()))
"""


@pytest.mark.slow
def test_blocks_are_made_and_overridden_quantization_is_none_with_the_patch_only() -> None:
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    before, after = (json.loads(line) for line in run.stdout.splitlines()[-2:])
    assert before == ["AssertionError", "TypeError"]
    assert after == ["MLPBlock()", "loaded"]
