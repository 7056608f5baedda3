"""All checks of the doctor, ordered by their dependencies. They leave no files or processes behind.

Megatron is imported once its patches are known to fit, vLLM's engine never. No CUDA context is
created: devices are queried through NVML, by torch as well.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.machine_memory import machine_memory
from mcore_rl.tools.doctor import finding, network, space, versions
from mcore_rl.tools.doctor import network as ports
from mcore_rl.tools.doctor import space as limits
from mcore_rl.tools.doctor import space as shared_memory
from mcore_rl.tools.doctor.finding import Finding, red, refusal
from mcore_rl.tools.doctor.gpus import Gpus, find_gpus

if TYPE_CHECKING:
    from mcore_rl.common.platform import Platform
    from mcore_rl.planner.plan import Outcome
    from mcore_rl.tools.doctor.flags import ReadJob

_USUAL_RANKS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Request:
    """Input of the doctor. Without a job it checks the installation and the machine only."""

    tokens: tuple[str, ...] = ()  # the job's flags
    world_size: int | None = None
    gpu_memory_bytes: int | None = None  # of a device, instead of the detected size
    gpu_reserved_bytes: int = 0
    host_memory_bytes: int | None = None


def examine(request: Request) -> list[Finding]:
    """Run every check; return the findings in the order of `AREAS`."""
    examination = _Examination(request)
    examination.installation()
    if request.tokens:
        examination.job()
    examination.machine()
    return sorted(examination.findings, key=lambda each: finding.AREAS.index(each.area))


class _Examination:
    def __init__(self, request: Request) -> None:
        self.findings: list[Finding] = []
        self._request = request
        # Copied before Megatron is imported, which sets variables of this process.
        self._environment = dict(os.environ)
        # Makes torch count devices through NVML, without starting CUDA.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self._gpus = Gpus()
        self._has_torch = False
        self._torch_cuda: str | None = None
        self._megatron_can_start = False
        self._read: ReadJob | None = None
        self._resumed: Path | None = None
        self._outcome: Outcome | None = None

    def _look(self, area: str, check: Callable[[], Sequence[Finding]]) -> None:
        try:
            self.findings += check()
        except UsageError as error:
            self.findings.append(refusal(area, error))
        # A machine may be broken in unforeseen ways: a check that fails itself is reported, and
        # does not hide the others.
        except Exception as error:
            what = (
                f"this check fails itself: {type(error).__name__}: {' '.join(str(error).split())}"
            )
            self.findings.append(red(area, what, "see whether what it looks at is in order"))

    def _has_red(self, *areas: str) -> bool:
        return any(each.level == "red" for each in self.findings if each.area in areas)

    # ------------------------------------------------------------------------- the installation

    def installation(self) -> None:
        # Separately, so that a failing import does not hide the versions.
        for check in (self._ask_nvml, self._import_torch, self._versions):
            self._look(finding.VERSIONS, check)
        if not self._has_torch:
            return
        self._look(finding.PATCHES, self._megatron_patches)
        self._megatron_can_start = not self._has_red(finding.PATCHES)
        self._look(finding.PATCHES, self._vllm_patches)
        if self._megatron_can_start:
            self._look(finding.FLAGS, self._taken_flags)
        else:
            what = (
                "the command line and what it names are not examined: Megatron cannot be imported"
            )
            self.findings.append(red(finding.FLAGS, what, "mend the installation first"))

    def _ask_nvml(self) -> list[Finding]:
        self._gpus = find_gpus()
        return []

    def _import_torch(self) -> list[Finding]:
        import torch

        self._has_torch, self._torch_cuda = True, torch.version.cuda
        return []

    def _versions(self) -> list[Finding]:
        return versions.check_versions(
            versions.installed_versions(),
            self._gpus,
            torch_cuda=self._torch_cuda,
            vllm_wants=versions.vllm_requirements(),
        )

    def _megatron_patches(self) -> list[Finding]:
        from mcore_rl.common.megatron_version import check_megatron
        from mcore_rl.patches.megatron import PATCHES
        from mcore_rl.tools.doctor.patches import check_patches

        check_megatron()
        return check_patches(PATCHES, "Megatron", apply=True)

    def _vllm_patches(self) -> list[Finding]:
        from mcore_rl.patches.megatron import PATCHES
        from mcore_rl.patches.vllm import patches
        from mcore_rl.tools.doctor.patches import check_patches

        # Applying them would import vLLM's models; they name exact versions. Both have torch's.
        return check_patches([p for p in patches() if p not in PATCHES], "vLLM", apply=False)

    def _taken_flags(self) -> list[Finding]:
        from mcore_rl.tools.doctor.flags import check_parser

        return check_parser()

    @property
    def _platform(self) -> Platform:
        from mcore_rl.common.platform import find_platform

        return find_platform()

    # ---------------------------------------------------------------------------------- the job

    def job(self) -> None:
        if not self._megatron_can_start or self._has_red(finding.FLAGS):
            return
        self._look(finding.FLAGS, self._flags)
        if self._read is None or self._read.config is None:
            return
        self._look(finding.CHECKPOINT, self._checkpoint)
        self._look(finding.CHECKPOINT, self._copies)
        if self._read.batch_is_right:
            self._look(finding.BATCHES, self._batches)
            self._look(finding.PLAN, self._plan)
        self._look(finding.PROMPTS, self._prompts_and_reward)

    def _flags(self) -> Sequence[Finding]:
        from mcore_rl.tools.doctor.flags import read_job
        from mcore_rl.tools.doctor.gpus import properties_from_nvml

        with properties_from_nvml(self._gpus):
            self._read = read_job(
                self._request.tokens,
                world_size=self._request.world_size or 1,
                platform=self._platform,
                environment=self._environment,
            )
        return self._read.findings

    def _checkpoint(self) -> list[Finding]:
        from mcore_rl.tools.doctor.checkpoint import check_hf_folder, check_load

        read = self._read
        assert read is not None and read.config is not None
        found = []
        if read.shape is not None and read.checkpoint is not None:
            found += check_hf_folder(read.shape, read.checkpoint)
        of_load, self._resumed = check_load(read.values, read.config)
        return [*found, *of_load]

    def _copies(self) -> list[Finding]:
        """Read the folders of other models; the actor's is done already."""
        from mcore_rl.tools.doctor.checkpoint import check_values_of

        spec = self._read.spec if self._read else None
        others = dict(spec.checkpoints) if spec else {}
        others.pop("--rl-hf-checkpoint", None)
        for flag, checkpoint in others.items():
            check_values_of(checkpoint, flag)
        return []

    def _batches(self) -> list[Finding]:
        from mcore_rl.tools.doctor.plan import check_batches

        assert self._read is not None
        return check_batches(self._read)

    def _plan(self) -> list[Finding]:
        from mcore_rl.tools.doctor.plan import DeviceMemory, check_plan, make_plan

        request = self._request
        total, source = request.gpu_memory_bytes, "--gpu-memory-gb"
        if total is None:
            total, source = self._gpus.smallest_bytes, "found here"
        memory = DeviceMemory(total, request.gpu_reserved_bytes, source)
        host = request.host_memory_bytes or machine_memory().limit_bytes
        assert self._read is not None
        made = make_plan(self._read, request.world_size or 1, memory, host)
        if isinstance(made, Finding):
            return [made]
        self._outcome = made
        return check_plan(made, memory)

    def _prompts_and_reward(self) -> list[Finding]:
        from mcore_rl.tools.doctor.prompts import check_prompts
        from mcore_rl.tools.doctor.reward import check_reward

        read = self._read
        assert read is not None and read.config is not None
        found, few = check_prompts(
            read.config,
            self._resumed,
            trust_remote_code=bool(read.values.get("trust_remote_code")),
        )
        config, model = read.config, read.reward_model
        self._look(finding.REWARD, lambda: check_reward(config, few, model))
        return found

    # ------------------------------------------------------------------------------ the machine

    def machine(self) -> None:
        ranks = self._local_ranks
        world = self._request.world_size or ranks
        environment = self._environment
        self._look(finding.PORTS, lambda: ports.check_ports(environment, local_ranks=ranks))
        self._look(
            finding.SHARED_MEMORY, lambda: shared_memory.check_shared_memory(local_ranks=ranks)
        )
        infiniband = bool(self._gpus.devices and network.infiniband_devices())
        self._look(
            finding.LIMITS, lambda: limits.check_limits(world_size=world, infiniband=infiniband)
        )
        self._look(finding.SPACE, self._space)
        self._look(finding.NETWORK, lambda: network.check_network(environment, self._use(ranks)))

    @property
    def _local_ranks(self) -> int:
        """Ranks of the job on this machine; without a job, one per GPU."""
        if self._request.world_size is None:
            return max(1, len(self._gpus.devices))
        usual = min(_USUAL_RANKS_PER_NODE, self._request.world_size)
        if self._read is None or self._read.config is None:
            return usual
        return min(self._read.config.engine.ranks_per_node, self._request.world_size) or usual

    def _space(self) -> list[Finding]:
        others = {"temporary files": Path(tempfile.gettempdir())}
        read = self._read
        if read is None or read.config is None:
            return space.check_disk(None, others)
        config, values = read.config, read.values
        others["the run directory"] = config.run.directory
        saves, host = None, []
        if self._outcome is not None and read.checkpoint is not None:
            saves = self._saves(config.trainer.num_steps, values, config.run.directory)
            host = [self._host_memory()]
        return [*space.check_disk(saves, others), *host]

    def _saves(self, num_steps: int, values: Mapping[str, Any], directory: Path) -> space.Saves:
        from mcore_rl.tools.doctor.checkpoint import num_parameters
        from mcore_rl.tools.doctor.plan import checkpoint_bytes

        read = self._read
        assert read is not None and read.checkpoint is not None and self._outcome is not None
        models = [read.checkpoint]
        if self._outcome.case.critic is not None:
            critic = read.spec.critic if read.spec else None
            models.append(critic.checkpoint if critic else read.checkpoint)
        size = checkpoint_bytes(self._outcome, [num_parameters(model) for model in models])
        interval, retain = values.get("save_interval"), values.get("save_retain_interval")
        folder = Path(str(values["save"])) if values.get("save") else directory / "checkpoints"
        return space.Saves(folder, size, space.num_kept(num_steps, interval, retain))

    def _host_memory(self) -> Finding:
        from mcore_rl.tools.doctor.plan import fullest_on_host

        assert self._read is not None and self._outcome is not None
        ranks, has_cuda = self._local_ranks, self._platform.cuda
        phase = fullest_on_host(self._read, self._outcome, local_ranks=ranks, has_cuda=has_cuda)
        return space.check_host_memory(phase, machine_memory(), ranks=ranks)

    def _use(self, ranks: int) -> network.NetworkUse:
        from mcore_rl.tools.doctor.network import NetworkUse

        read = self._read
        if read is None or read.config is None:
            return NetworkUse(has_gpu=bool(self._gpus.devices), local_ranks=ranks)
        from mcore_rl.tools.doctor.reward import asks_loopback

        values, config = read.values, read.config
        splits = ("tensor_model_parallel_size", "context_parallel_size")
        return NetworkUse(
            has_gpu=bool(self._gpus.devices),
            local_ranks=ranks,
            num_nodes=math.ceil((self._request.world_size or 1) / ranks),
            capabilities=tuple(device.capability for device in self._gpus.devices),
            splits_layers=any((values.get(dest) or 1) > 1 for dest in splits),
            uses_fsdp=bool(values.get("use_megatron_fsdp") or values.get("use_torch_fsdp2")),
            overlaps_experts=bool(values.get("overlap_moe_expert_parallel_comm")),
            timeout_minutes=values.get("distributed_timeout_minutes"),
            stage_timeout_seconds=config.run.stage_timeout_seconds,
            asks_loopback=asks_loopback(config),
            local_checkpoint=bool(
                config.trainer.hf_checkpoint and os.path.isdir(config.trainer.hf_checkpoint)
            ),
        )
