"""The point where a run resumes: the newest undamaged checkpoint, and the trainer's state in it."""

from __future__ import annotations

import argparse
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.common.agreement import agreed
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.data.demonstrations import Demonstrations, Drawn
from mcore_rl.data.options import CONTINUE, RESTART, STOP
from mcore_rl.data.prompts import PromptSources
from mcore_rl.data.source_position import Begin, changes_between, continued
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.megatron.hf_checkpoint import fingerprint
from mcore_rl.megatron.rng import RngState
from mcore_rl.rollout.sampling_state import check_environments, count_unfinished
from mcore_rl.spec import JobSpec
from mcore_rl.trainer.resume import folders
from mcore_rl.trainer.resume.adapters import check_same_adapters, check_stored_adapters
from mcore_rl.trainer.resume.folders import Damage
from mcore_rl.trainer.resume.trainer_state import (
    LOADED,
    TRAINER,
    TrainerState,
    check_mtp,
    load_trainer_state,
)

logger = logging.getLogger(__name__)

ROLLOUT = "rollout"  # the folder in a checkpoint with the rollouts' state
REFERENCE = "reference"  # the folder in a checkpoint with the reference's weights


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint of mcore_rl that a run resumes from."""

    folder: Path  # of the checkpoint
    state: TrainerState
    rng: RngState | None  # of this rank; None for another layout
    same_prompts: bool = True  # as before the checkpoint
    # Whether the checkpoint is of another kind of training, such as the supervised one before this:
    # its policy is then what this run begins with, and its reference.
    follows_another: bool = False

    @property
    def reference(self) -> Path | None:
        """The folder of a reference's weights, as a checkpoint of its own; None: the Hugging Face
        folder has them, as `find_resume_point` has checked."""
        kept = self.folder / REFERENCE
        return kept if kept.is_dir() else None


def find_resume_point(
    spec: JobSpec,
    args: argparse.Namespace,
    prompts: Drawn,
    eval_prompts: Drawn | None,
    also_check: Callable[[Path, TrainerState], None] | None = None,
) -> ResumePoint | None:
    """Return what `--load` resumes, None for a new run. Collective; before models are built.

    `also_check` is called with the folder and state of a checkpoint of the same prompts.

    If `--rl-hf-checkpoint` provides the KL's reference, it must be the one that the run began with.

    Sets `args.ckpt_step`, so that Megatron loads the same, and `args.no_load_optim` after another
    kind of training. A checkpoint written by Megatron itself is left to Megatron. `--finetune`,
    which counts from 0 again, takes the weights alone; adapters keep their alpha and base. A user's
    mistake ends every rank with exit code 2.
    """
    config = spec.config
    save = folders.checkpoint_folder(args.save, config.run.directory)

    def find() -> ResumePoint | None:
        load = None if args.load is None else Path(args.load)
        _check_load(args, config, load)
        step, beside = None, []
        if load is not None:
            beside = [folders.critic_folder(load)] if config.recipe.needs_critic else []
            step = choose(load, beside=beside, step=args.ckpt_step)
            if step is None:
                _log_what_megatron_finds(load, args.ckpt_step)
        folders.check_beginning(save, load, step, asked=args.ckpt_step, finetune=args.finetune)
        if load is None or step is None:
            return None
        check_mtp(load, step, args.mtp_num_layers)
        check_stored_adapters(load, step, spec.lora)
        args.ckpt_step = step
        folder = load / folders.iteration_name(step)
        if args.finetune and spec.lora is None:
            return None
        with_rng = not (args.no_load_rng or args.finetune)
        state, rng = load_trainer_state(folder / TRAINER, with_rng=with_rng)
        if spec.lora is not None:
            now, base = fingerprint(spec.checkpoint), spec.checkpoint.folder
            check_same_adapters(state, spec.lora, now, load=folder, base=base)
        if args.finetune:
            return None
        if beside and folders.places_of(load, beside) == [load]:
            check_warmup(config.critic.warmup_steps, step, load)
        if (warning := misplaced_optimizer(state, args)) and dist.get_rank() == 0:
            logger.warning("[Resume] %s: %s", folder, warning)
        # First, since it is collective: the next checks may fail on some ranks alone.
        follows_another = prompts.follow(state.prompts)
        if follows_another:
            args.no_load_optim = True  # moments of another loss
        kept = follows_another or (folder / REFERENCE).is_dir()
        if config.recipe.needs_reference and not kept:
            now = fingerprint(spec.checkpoint)
            if reason := lost_reference(state, now, spec.checkpoint.folder):
                raise UsageError(
                    f": {reason}",
                    flag=f"--load {folder}",
                    remedy="or begin a new run with the trained weights, which are its reference "
                    "then, by --finetune and another --rl-run-dir",
                )
        same_prompts = prompts.are_those_of(state.prompts) is not False
        if same_prompts and also_check is not None:
            also_check(folder, state)
        resumed = with_known_prompts(state, config, prompts, eval_prompts)
        if not same_prompts and dist.get_rank() == 0:
            log_dropped(folder)
        return ResumePoint(
            folder,
            resumed,
            _of_same_layout(state, rng, spec.train_layout.describe(), args),
            same_prompts=same_prompts,
            follows_another=follows_another,
        )

    store = dist.distributed_c10d._get_default_store() if dist.get_world_size() > 1 else None
    return agreed(find, store, stage="resume")


def choose(folder: Path, *, beside: Sequence[Path] = (), step: int | None = None) -> int | None:
    """Return the step to resume from, None without a checkpoint of mcore_rl. Collective.

    `folder` is `--load`; a step counts if the folders `beside` it (a critic's) have it, too, unless
    they begin later (`places_of`). `step` is `--ckpt-step`, if given. Each file is read by one rank
    and compared with its digest. A damaged checkpoint is named in a warning, and the previous one
    is taken. Nothing is deleted.

    Raises UsageError on all ranks if `step` is missing or damaged, or if every checkpoint is
    damaged.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places_and_steps: tuple[list[Path], list[int]] = [], []
    if rank == 0:
        for place in (folder, *(each for each in beside if each.is_dir())):
            _recover(place)
        places = folders.places_of(folder, beside)
        places_and_steps = places, folders.common_steps(places)
    places, steps = objects.broadcast(places_and_steps)
    started = time.perf_counter()
    chosen = folders.newest_undamaged(
        *(folder, steps, step),
        lambda candidate: _damage(places, candidate, rank, world_size),
        logs=rank == 0,
    )
    if chosen is not None:
        logger.info(
            "[Resume] resuming from step %d of %s, whose files are as they were written (checked "
            "in %.1f s)",
            *(chosen, folder, time.perf_counter() - started),
        )
    return chosen


def _recover(place: Path) -> None:
    """Finish killed saves, without raising for a read-only folder, since other ranks wait."""
    try:
        for step in folders.recover(place):
            logger.info("[Resume] the save of step %d in %s was finished", step, place)
    except OSError as error:
        logger.warning("[Resume] %s cannot be recovered (%s)", place, error)


def _damage(places: Sequence[Path], step: int, rank: int, world_size: int) -> list[Damage]:
    """Return the damage that any rank has found, the same on all."""
    mine = [
        damage
        for place in places
        for damage in folders.damage(place, step, rank=rank, world_size=world_size)
    ]
    everywhere = objects.all_gather(mine)
    return sorted({damage for damages in everywhere for damage in damages}, key=str)


def misplaced_optimizer(state: TrainerState, args: argparse.Namespace) -> str:
    """Return why the optimizer's states may belong to other parameters, and the remedy, or "".

    Earlier versions wrote them to wrong places of a fully reshardable checkpoint if gradients are
    in several buckets: with --overlap-grad-reduce, or if two pipeline stages share an embedding.
    Facts of that run that the checkpoint lacks are taken from `args`.
    """
    if state.optimizer_by_parameter or args.no_load_optim:
        return ""
    if not (args.use_distributed_optimizer and args.dist_ckpt_optim_fully_reshardable):
        return ""
    stages = re.search(r"\bPP(\d+)", state.layout)
    is_shared = not args.untie_embeddings_and_output_weights or args.mtp_num_layers
    if not args.overlap_grad_reduce and not (is_shared and stages and int(stages[1]) > 1):
        return ""
    return (
        "an earlier version of mcore_rl wrote it, and may have put states of the optimizer at the "
        "places of other parameters; give --no-load-optim to begin with new ones"
    )


def lost_reference(state: TrainerState, now: str, folder: Path) -> str:
    """Return why the weights of `folder`, with fingerprint `now`, are not the reference of a run
    whose checkpoint has none, and the remedy; "" if they are."""
    if state.began_with == now:
        return ""
    if state.began_with == LOADED:
        return (
            "the run began with the weights of a Megatron checkpoint and without a KL, so that the "
            "reference which a KL now needs was not kept; leave the KL out as before"
        )
    if not state.began_with:
        return (
            "an earlier version of mcore_rl wrote it and did not record the reference of the KL; "
            "continue with that version"
        )
    return (
        f"--rl-hf-checkpoint {folder} has other weights than those that the run began with, which "
        "are the reference of its KL; bring these back"
    )


def _check_load(args: argparse.Namespace, config: RLConfig, load: Path | None) -> None:
    """Call `folders.check_load` on the first rank for all."""
    refusal: UsageError | None = None
    if dist.get_rank() == 0:
        try:
            folders.check_load(
                load,
                asked=args.ckpt_step,
                pretrained=args.pretrained_checkpoint,
                may_begin=config.trainer.load_or_start,
                exits=args.exit_on_missing_checkpoint,
            )
        except UsageError as error:
            refusal = error
    if (received := objects.broadcast(refusal)) is not None:
        raise received


def check_environments_of(
    environment: EnvironmentSpec | None, prompts: PromptSources, seed: int
) -> Callable[[Path, TrainerState], None] | None:
    """Return a check that raises UsageError if a checkpoint's conversations were with other
    environments than this; None without one."""
    if environment is None:
        return None

    def check(folder: Path, state: TrainerState) -> None:
        drawn = prompts.begun(state.begin)

        def class_of(draw: int) -> str:
            return environment.class_for(drawn.of_draw(draw, seed=seed).source)

        check_environments(folder / ROLLOUT, class_of)

    return check


def check_warmup(num_steps: int | None, step: int, load: Path) -> None:
    """Refuse a warm-up of a new critic that is over when the critic begins, at `step`."""
    if num_steps and num_steps <= step:
        raise UsageError(
            f"is over at step {step}, where this run continues from --load {load} with a new "
            "critic: steps are counted from the first run's start",
            flag=f"--rl-critic-warmup-steps {num_steps}",
            remedy=f"give {step + num_steps} for a warm-up of {num_steps} steps, or drop it",
        )


def _log_what_megatron_finds(load: Path, asked: int | None) -> None:
    if asked is not None or (load / folders.TRACKER).is_file():
        logger.info(
            "[Resume] %s is a checkpoint of Megatron's own: its weights and training state are "
            "loaded; the prompts start at the position of its step",
            load,
        )
    else:
        logger.info("[Resume] nothing is complete in %s yet: the run begins", load)


def with_known_prompts(
    state: TrainerState,
    config: RLConfig,
    prompts: Drawn,
    eval_prompts: Drawn | None,
) -> TrainerState:
    """Return the state with which a run draws from `prompts`. Warns if they are other ones than
    before; raises UsageError if the run is to stop then."""
    if eval_prompts is not None and eval_prompts.are_those_of(state.eval_prompts) is False:
        _warn(
            "[Resume] --rl-eval-prompts are others than before step %d: accuracies before and "
            "after it do not compare",
            state.step,
        )
    if prompts.follow(state.prompts):
        logger.info(
            "[Resume] the run before step %d was another kind of training: --rl-prompts begin with "
            "the first, and the optimizer and its schedule are new",
            state.step,
        )
        return state.drawing(0, Begin())
    are_same = prompts.are_those_of(state.prompts)
    if are_same is None:
        _warn(
            "[Resume] an earlier version of mcore_rl wrote the checkpoint and recorded the files "
            "of prompts, not their tokens: whether they are the same is not known"
        )
    if are_same is not False:
        return state
    choice = config.data.on_changed_prompts
    if choice == STOP or (choice == CONTINUE and not prompts.may_continue):
        why = changes_between(state.prompts, prompts.fingerprint) or (
            "the file, the tokenizer, the chat template, a library or --rl-max-prompt-tokens has "
            "changed"
        )
        raise UsageError(
            f"are others than those that the checkpoint of step {state.step} has drawn from "
            f"({why})",
            flag=f"--rl-prompts {config.data.prompts}",
            remedy=f"bring them back, or begin with the first of all by --rl-on-changed-prompts "
            f"{RESTART}"
            + (
                f", or continue those that are the same by {CONTINUE}"
                if prompts.may_continue
                else ""
            ),
        )
    if choice == RESTART:
        _warn("[Resume] --rl-prompts are others than before: they begin with the first")
        return state.drawing(0, Begin())
    position = state.sampler_position
    begin = continued(state.prompts, state.begin, position, prompts.fingerprint)
    after = ", ".join(f"'{name}' after {count} prompts" for name, count in begin.counts.items())
    _warn(
        "[Resume] --rl-prompts are others than before: %s continues, others begin with the first",
        after or "no source",
    )
    return state.drawing(position, begin)


def warn_of_other_demonstrations(state: TrainerState, rows: Demonstrations) -> None:
    """Warn on the first rank if a resumed run learns other rows besides than before."""
    if rows.are_those_of(state.demonstrations) is False:
        _warn(
            "[Resume] --rl-sft-demonstrations are others than before step %d: their rows are drawn "
            "as if they had been there from the first step",
            state.step,
        )


def _warn(text: str, *values: object) -> None:
    """Log what all ranks find on the first one."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(text, *values)


def log_dropped(folder: Path) -> None:
    """Warn of groups that a run with other prompts does not continue."""
    if num_groups := count_unfinished(folder / ROLLOUT):
        logger.warning(
            "[Resume] %d groups in %s that were not trained on are dropped, since --rl-prompts are "
            "others than before",
            num_groups,
            folder,
        )


def _of_same_layout(
    state: TrainerState, rng: RngState | None, layout: str, args: argparse.Namespace
) -> RngState | None:
    if args.no_load_rng:
        return None
    if state.layout == layout:
        return rng
    logger.info(
        "[Resume] the checkpoint was written by %s, this is %s: the random states of training "
        "start anew",
        state.layout,
        layout,
    )
    return None
