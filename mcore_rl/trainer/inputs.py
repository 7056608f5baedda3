"""What a run reads before its models are built: prompts or rows, and where it resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Generic, TypeVar

from mcore_rl.common import objects
from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.data.demonstrations import Demonstrations
from mcore_rl.data.prompts import PromptSources, load_prompt_files, log_examples
from mcore_rl.data.tokenizer_process import close_all
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.hf_checkpoint import fingerprint
from mcore_rl.rollout.branch import Branch
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.resume import point as resume_point
from mcore_rl.trainer.resume.point import ResumePoint, check_environments_of, find_resume_point
from mcore_rl.trainer.resume.trainer_state import LOADED, TrainerState, date_of_checkpoints
from mcore_rl.trainer.sampling import Start, branch_of
from mcore_rl.trainer.supervised import read_supervised

D = TypeVar("D", PromptSources, Demonstrations)


@dataclass(frozen=True, slots=True)
class Inputs(Generic[D]):
    """The prompts of a run with engines, or the rows of supervised training, and the rest."""

    prompts: D
    eval_prompts: D | None
    day: str  # for chat templates
    point: ResumePoint | None  # None: nothing is resumed
    began_with: str  # see `TrainerState`
    branch: Branch | None  # None: nothing is sampled ahead

    @property
    def weight_version(self) -> int:
        """The number of hand-overs before."""
        return 0 if self.point is None else self.point.state.weight_version

    def position(self, job: Job, num_steps: int) -> int:
        """Return how many prompts or rows were drawn in the `num_steps` steps before."""
        drawn = num_steps * job.config.trainer.num_prompts_per_step
        return drawn if self.point is None else self.point.state.sampler_position


def start_of(job: Job, inputs: Inputs[PromptSources], num_steps: int = 0) -> Start:
    """Return what sampling begins with after `num_steps` steps."""
    point, folder = inputs.point, None
    if point is not None:
        folder = point.folder / resume_point.ROLLOUT if point.same_prompts else None
    return Start(
        inputs.prompts,
        inputs.eval_prompts,
        inputs.day,
        inputs.position(job, num_steps),
        folder,
        inputs.began_with,
        inputs.branch.name if inputs.branch else "",
    )


def read_prompts(job: Job) -> Inputs[PromptSources]:
    """Read the prompts of a run with engines, and the checkpoint to resume from. Collective."""
    day = _date(job)
    prompts, held_out = load_prompt_files(
        job.config.data,
        job.spec.checkpoint.folder,
        per_step=job.config.trainer.num_prompts_per_step,
        trust_remote_code=job.spec.trust_remote_code,
        date=day,
    )
    log = prompts.parts[0]
    also_check = check_environments_of(job.spec.environment, prompts, job.args.seed)
    return _inputs(job, prompts, held_out, day, lambda: log_examples(log), also_check)


def read_rows(job: Job) -> Inputs[Demonstrations]:
    """Read the rows of supervised training, and the checkpoint to resume from. Collective."""
    day = _date(job)
    how = {"trust_remote_code": job.spec.trust_remote_code, "date": day}
    rows, held_out = read_supervised(job.config, job.spec.checkpoint.folder, **how)
    return _inputs(job, rows, held_out, day, lambda: log_examples(rows))


def _inputs(
    job: Job,
    prompts: D,
    held_out: D | None,
    day: str,
    log: Callable[[], None],
    also_check: Callable[[Path, TrainerState], None] | None = None,
) -> Inputs[D]:
    _require_same_prompts(prompts.fingerprint, job.config)
    log()
    close_all()  # of the tokenizer: prompts are tokenised, and environments start another one
    point = find_resume_point(job.spec, job.args, prompts, held_out, also_check)
    if point is not None:
        prompts = prompts.begun(point.state.begin)
    return Inputs(prompts, held_out, day, point, _began_with(job, point), branch_of(job, point))


def _date(job: Job) -> str:
    """Return the date for chat templates, same on all ranks: the date of the run's first start, so
    that a resumed run draws the same prompts. Collective."""
    resumes = job.args.load is not None and not job.args.finetune
    known = date_of_checkpoints(Path(job.args.load)) if resumes else None
    day: str = objects.broadcast(known or date.today().isoformat())
    return day


def _require_same_prompts(fingerprint: str, config: RLConfig) -> None:
    """Raise UsageError on all ranks if machines have made different prompts. Collective."""
    fingerprints = set(objects.all_gather(fingerprint))

    def check() -> None:
        if len(fingerprints) > 1:
            raise UsageError(
                "gives other prompts on some machines (files, tokenizers or libraries differ)",
                flag=f"--rl-prompts {config.data.prompts}",
                remedy="give all machines the same",
            )

    agreed_in_world(check)


def _began_with(job: Job, point: ResumePoint | None) -> str:
    """Return the run's `TrainerState.began_with`. Collective."""
    if point is not None:
        return point.state.began_with
    if job.spec.lora is None and megatron_checkpoint.loads_checkpoint(job.args):
        return LOADED
    return fingerprint(job.spec.checkpoint)
