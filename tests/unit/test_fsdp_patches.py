"""Megatron-FSDP's repairs: what they change for it, and that they change nothing for others.

That it runs, saves and loads is shown by tests/dist/test_fsdp.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.rank_pool import RankPool

ITS_DEVICE_IS_THE_CPU = """
from mcore_rl.megatron import adapter as megatron_adapter
import torch
from megatron.core.distributed.fsdp import mcore_fsdp_adapter as outer
from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp, param_and_grad_buffer
for module in (outer, megatron_fsdp, param_and_grad_buffer):
    assert module.torch.device("cuda:0") == module.torch.device("cuda", 0) == torch.device("cpu")
    assert module.torch.device("meta") == torch.device("meta")
    assert module.torch.zeros(1, device="cuda").device.type == "cpu"
assert torch.device("cuda:0").type == "cuda"
assert torch.distributed.device_mesh.DeviceMesh.__name__ == "DeviceMesh"
"""
SUMS_ARE_SCALED_FIRST = """
from mcore_rl.megatron import adapter as megatron_adapter
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
prepare = param_and_grad_buffer.gradient_reduce_preprocessing
SUM, AVG = torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG
gradient = torch.tensor([4.0, 8.0])
assert prepare(gradient, None, DistributedDataParallelConfig()) == SUM
averaging = DistributedDataParallelConfig(average_in_collective=True)
assert prepare(gradient, 0.5, averaging) == AVG
assert gradient.tolist() == [4.0, 8.0]
assert prepare(gradient, 0.5, DistributedDataParallelConfig()) == SUM
assert gradient.tolist() == [2.0, 4.0]
"""
GATHERS_END_ON_LEAVING = """
from mcore_rl.megatron import adapter as megatron_adapter
import time
import torch
from torch import distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
dist.init_process_group("gloo")
group, gathered = dist.group.WORLD, torch.zeros(2)
time.sleep(dist.get_rank())  # rank 0 cannot end before rank 1 begins
with param_and_grad_buffer._coalescing_manager(group, async_ops=True) as works:
    dist.all_gather_into_tensor(gathered, torch.ones(1), group=group, async_op=True)
assert [work.is_completed() for work in works.works] == [True]
assert gathered.tolist() == [1, 1]
works.wait()
with param_and_grad_buffer._coalescing_manager(group):  # nothing to wait for
    dist.all_reduce(gathered, group=group)
dist.destroy_process_group()
"""
STATE_IS_COMPLETED = """
from mcore_rl.megatron import adapter as megatron_adapter
import torch
from mcore_rl.patches.megatron.fsdp_checkpoint import _complete
parameters = [torch.nn.Parameter(torch.ones(n)) for n in (0, 3, 0)]
optimizer = torch.optim.AdamW(parameters)
_complete(optimizer)
assert not optimizer.state  # before the first step nobody has one
for _ in range(2):
    parameters[1].grad = torch.ones(3)
    optimizer.step()
moments = optimizer.state[parameters[1]]["exp_avg"].clone()
_complete(optimizer)
assert set(optimizer.state) == set(parameters)
assert [float(optimizer.state[p]["step"]) for p in parameters] == [2, 2, 2]
assert [optimizer.state[p]["exp_avg_sq"].numel() for p in parameters] == [0, 3, 0]
assert torch.equal(optimizer.state[parameters[1]]["exp_avg"], moments)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            code,
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="the repair does not exist where there is a GPU"
            ),
        )
        for code in (ITS_DEVICE_IS_THE_CPU, SUMS_ARE_SCALED_FIRST, GATHERS_END_ON_LEAVING)
    ]
    + [STATE_IS_COMPLETED],
    ids=["devices", "sums", "gathers", "adam"],
)
def test_fsdp_repair_has_its_effect(code: str, ranks: RankPool) -> None:
    ranks.run("tests.rank_pool:execute", world_size=2, code=code)
