"""What a rank does in `test_optimizer_saving.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_rl.job.start import start
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.models import build_actor
from tests.dist.jobs import first_mini_batch, started
from tests.dist.sleeping import digest
from tests.live_bytes import LiveBytes


def learn_and_save(flags: list[str], target: str, is_offloaded: bool = False) -> dict[str, Any]:
    """An update, then a checkpoint in `ours`, and one in `megatrons` by the format's own code.

    Of each the bytes of tensors that this rank made for it at most; and what the optimizer holds.
    """
    job, actor = _started(flags, is_offloaded)
    actor.update(first_mini_batch(job))
    held = megatron_adapter.train_tensors(actor.state)["optimizer"]
    num_bytes = sum(tensor.nbytes for _, tensor in held)
    found: dict[str, Any] = {"optimizer": _digests(actor.state), "bytes": num_bytes}
    for name, patched in (("ours", contextlib.nullcontext()), ("megatrons", _unpatched())):
        gc.collect()
        with patched, open("/dev/null", "w") as log, megatron_adapter.megatron_output_to(log):
            with LiveBytes() as live:
                megatron_checkpoint.save_checkpoint(job.args, actor.state, 1, Path(target) / name)
        found[f"{name} peak"] = live.peak_bytes
    dist.destroy_process_group()
    return found


def load(flags: list[str], is_offloaded: bool = False) -> dict[str, Any]:
    """What the optimizer holds after `--load`, the most bytes of tensors while it was read, and
    the settings of its groups, which scheduler and Adam take."""
    with LiveBytes() as live:
        _, actor = _started(flags, is_offloaded)
        gc.collect()
        held = live.live_bytes
    found = {"optimizer": _digests(actor.state), "beyond": live.peak_bytes - held}
    groups = [group for each in actor.state.optimizers for group in each.optimizer.param_groups]
    found["settings"] = [
        {name: float(group[name]) for name in ("lr", "max_lr", "min_lr", "step")}
        | {"betas": list(group["betas"]), "fused": group["fused"]}
        for group in groups
    ]
    dist.destroy_process_group()
    return found


def _started(flags: list[str], is_offloaded: bool) -> tuple[Job, Actor]:
    """Megatron, or Megatron with `--optimizer-cpu-offload` as on a device with Transformer Engine:
    its optimizer then has float32 copies of bfloat16 parameters, which it updates for them."""
    if not is_offloaded:
        return started(flags)[:2]
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    distrib_optimizer.HAVE_APEX_OR_TE = True
    groups_of = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def as_on_a_device(self: Any, fraction: float) -> Any:
        cpu_groups, gpu_groups, copies, originals, in_float32 = groups_of(self, fraction)
        for original, copy in in_float32.items():
            copies[original], originals[copy] = copy, original
        return cpu_groups, gpu_groups, copies, originals, in_float32

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = as_on_a_device
    with open("/dev/null", "w") as log:
        job = start(flags, log=log, has_engine=False)
        job.args.optimizer_cpu_offload = job.args.use_precision_aware_optimizer = True
        job.args.pin_cpu_grads = job.args.pin_cpu_params = False
        state, _ = build_actor(job, None, log=log)
    return job, Actor(job, state)


@contextlib.contextmanager
def _unpatched() -> Iterator[None]:
    """Saving as Megatron does it by itself."""
    import megatron.core.optimizer.distrib_optimizer as patched

    assert patched.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{patched.__name__}_again", patched.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    optimizer, name = patched.DistributedOptimizer, "sharded_param_state_fully_reshardable"
    ours = getattr(optimizer, name)
    setattr(optimizer, name, getattr(again.DistributedOptimizer, name))
    try:
        yield
    finally:
        setattr(optimizer, name, ours)


def _digests(state: megatron_adapter.TrainState) -> dict[str, str]:
    return {n: digest(t) for n, t in megatron_adapter.train_tensors(state)["optimizer"]}
