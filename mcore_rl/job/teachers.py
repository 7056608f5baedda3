"""The checks of teachers: their flags, their folders or servers, and their tokenizers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.common.addresses import checked_url, header_from
from mcore_rl.common.errors import UsageError
from mcore_rl.common.http import HTTPFailure
from mcore_rl.common.parameters import ExtraArgs
from mcore_rl.common.readers import parse_json
from mcore_rl.config import RLConfig
from mcore_rl.data.messages import RejectedRow
from mcore_rl.data.prompt_cache import tokenizer_process
from mcore_rl.data.sources import PROMPTS
from mcore_rl.data.tokenizer_process import (
    ChatTemplate,
    ProcessEnded,
    TokenizerProcess,
    close_all,
)
from mcore_rl.hybrid_engine.remote.prompt_scores import PromptScores
from mcore_rl.job.facts import LENGTHS, Facts, Refusals, Source
from mcore_rl.job.reading import ReadShape
from mcore_rl.job.value_models import ValueOptions, check_positions, tokens_of_degrees
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, check_tensors, open_checkpoint
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.roles import TEACHER
from mcore_rl.model.teacher import FULL, TOKEN, TOP_K, TeacherOptions, TeacherPlace
from mcore_rl.rewards.functions import NO_REWARD
from mcore_rl.spec import JobSpec, LaidOut, TeacherSpec, is_swapped

_FLAG = "--rl-teacher"
# Letters, digits, signs, spaces, several scripts: tokenizers that agree on it rarely differ.
_SAMPLE = "The 12345 quick-brown foxes, x**2 == 6.78?\n\tNaïve café — 你好, мир; αβγ 🙂 def f(x):"


def check_teacher_flags(config: RLConfig) -> None:
    """Check the flags of teachers against each other, without their folders and servers."""
    options, teachers = config.teacher, config.teachers
    _check_no_reward(config)
    if options.teacher and options.teacher not in [each.place for each in teachers]:
        raise UsageError(
            f"has no effect, because every source of {PROMPTS} {config.data.prompts} has another "
            "or none",
            flag=f"{_FLAG} {options.teacher}",
            remedy="drop it, or the teacher of a source",
        )
    if not teachers:
        for flag, value in options.given().items():
            raise UsageError(
                f"has no effect without {_FLAG}",
                flag=f"{flag} {value}",
                remedy="add it, or drop this",
            )
        return
    if options.teacher_form != TOP_K and "--rl-teacher-top-k" in options.given():
        raise UsageError(
            f"has no effect with --rl-teacher-form {options.teacher_form}",
            flag=f"--rl-teacher-top-k {options.teacher_top_k}",
            remedy="set that to topk, or drop this",
        )
    if options.teacher_form == FULL and config.trainer.fp32_lm_head:
        raise UsageError(
            "cannot be combined with --rl-fp32-lm-head",
            flag=f"--rl-teacher-form {FULL}",
            remedy="set it to topk, or drop the other",
        )
    num_top = config.recipe.score_centering
    if num_top and options.teacher_form != TOKEN:
        raise UsageError(
            f"cannot be combined with --rl-score-centering {num_top}",
            flag=f"--rl-teacher-form {options.teacher_form}",
            remedy="set it to token, or drop the other",
        )
    _check_unused(options, teachers)
    _check_number(options, teachers)
    for each in teachers:
        if each.url is not None:
            _check_server_flags(config, each)


def _check_unused(options: TeacherOptions, teachers: Sequence[TeacherPlace]) -> None:
    """Refuse flags of servers if all teachers are folders, and the other way around."""
    of_server = {
        "--rl-teacher-header-env": options.teacher_header_env,
        "--rl-teacher-wait-minutes": options.given().get("--rl-teacher-wait-minutes"),
    }
    of_model = {
        "--rl-teacher-tp-size": options.teacher_tp_size,
        "--rl-teacher-pp-size": options.teacher_pp_size,
        "--rl-teacher-ep-size": options.teacher_ep_size,
        "--rl-teacher-ranks": options.teacher_ranks,
    }
    unused = {} if any(each.url for each in teachers) else of_server
    if not any(each.folder for each in teachers):
        unused = unused | of_model
    for flag, value in unused.items():
        if value is not None:
            what = "a server" if flag in of_model else "a folder"
            raise UsageError(
                f"has no effect, because {teachers[0].shown} is {what}",
                flag=f"{flag} {value}",
                remedy="drop it",
            )


def _check_number(options: TeacherOptions, teachers: Sequence[TeacherPlace]) -> None:
    """Refuse what is for one teacher."""
    folders = [each.place for each in teachers if each.folder]
    if options.teacher_ranks is not None and len(folders) > 1:
        raise UsageError(
            f"are for one teacher in a folder, and {len(folders)} are given ({', '.join(folders)})",
            flag=f"--rl-teacher-ranks {options.teacher_ranks}",
            remedy="drop it, so that they take turns on the actor's ranks, or serve the others",
        )
    if options.teacher_form == FULL and len(teachers) > 1:
        places = ", ".join(each.place for each in teachers)
        raise UsageError(
            f"is for one teacher, whose output layer is beside the actor's, and {len(teachers)} "
            f"are given ({places})",
            flag=f"--rl-teacher-form {FULL}",
            remedy=f"set it to {TOP_K} or {TOKEN}",
        )


def _check_no_reward(config: RLConfig) -> None:
    """Check that samples without rewards have a teacher, and nothing that compares rewards."""
    sources = () if config.data.prompts is None else config.data.train_sources()
    rewards = [each.reward or config.reward for each in sources] or [config.reward]
    for number, teacher in enumerate(config.teachers_of_sources):
        names = [name.strip() for name in rewards[number].split(",")]
        if NO_REWARD not in names:
            continue
        if len(names) > 1:
            found, remedy = "names none next to other rewards", "leave it out"
        elif teacher is None:
            found, remedy = "leaves nothing to learn from", f"add {_FLAG}, or name a reward"
        elif config.recipe.dynamic_sampling:
            found = "cannot be combined with --rl-dynamic-sampling, which drops groups of equal "
            found, remedy = f"{found}rewards", "drop one of the two (--rl-algorithm dapo has it on)"
        elif config.recipe.group_filter is not None:
            found = f"leaves --rl-group-filter {config.recipe.group_filter} no rewards to decide by"
            remedy = "drop one of the two"
        else:
            continue
        flag = f"--rl-reward {rewards[number]}"
        if len(sources) > 1 and sources[number].reward is not None:
            flag = f"{PROMPTS} {config.data.prompts}: reward none of '{sources[number].name}'"
        raise UsageError(found, flag=flag, remedy=remedy)


def _check_server_flags(config: RLConfig, teacher: TeacherPlace) -> None:
    checked_url(teacher.place, teacher.flag)
    header_from(config.teacher.teacher_header_env, "--rl-teacher-header-env")
    if config.teacher.teacher_form != TOKEN:
        raise UsageError(
            f"is for a teacher in a folder, and {teacher.shown} is a server",
            flag=f"--rl-teacher-form {config.teacher.teacher_form}",
            remedy="set it to token, or give the teacher's folder",
        )
    if config.rollout.temperature != 1.0:
        raise UsageError(
            f"cannot be combined with --rl-temperature {config.rollout.temperature:g}: a server "
            "returns the log-probs of prompts at temperature 1",
            flag=teacher.shown,
            remedy="set --rl-temperature 1, or give the teacher's folder",
        )


@dataclass(frozen=True, slots=True)
class ReadTeacher:
    """A teacher in a folder, before it is laid out."""

    options: ValueOptions
    shape: ModelShape
    checkpoint: HFCheckpoint | None  # None: not read, or refused


def read_teacher(
    teacher: TeacherPlace,
    config: RLConfig,
    shape: ModelShape,
    facts: Facts,
    refusals: Refusals,
    source: Source,
) -> ReadTeacher | None:
    """Read and check a teacher's folder; `shape` is the actor's. Returns None if its config.json
    was refused."""
    assert teacher.folder is not None
    options = config.teacher
    sizes = (options.teacher_tp_size, options.teacher_pp_size, options.teacher_ep_size)
    tokens = tokens_of_degrees(sizes)
    own = ValueOptions(TEACHER, "teacher", teacher.flag, teacher.folder, tokens, learns=False)
    own_shape = refusals.value(_read_shape, own, options, shape, source.read_shape)
    if own_shape is None:
        return None
    checkpoint = None
    if source.has_files and facts.checkpoint is not None:
        trusts = bool(facts.given.get("trust_remote_code"))
        actor = facts.checkpoint.folder
        checkpoint = refusals.value(_read_folder, teacher, own_shape, actor, trusts=trusts)
    if refusals.knows(LENGTHS):
        refusals.passes(check_positions, own, config, own_shape)
    return ReadTeacher(own, own_shape, checkpoint)


def _read_shape(
    options: ValueOptions, teacher: TeacherOptions, shape: ModelShape, read_shape: ReadShape
) -> ModelShape:
    """Return the shape of the teacher's folder. Both pad their vocabulary, so that neither needs
    to be the larger one."""
    own = read_shape(options.init, options.init_flag)
    k, flag = teacher.num_top_tokens, f"--rl-teacher-form {teacher.teacher_form}"
    if teacher.teacher_form != TOKEN and own.vocab_size != shape.vocab_size:
        raise UsageError(
            f"needs models of one vocabulary, and {own.vocab_size} of {options.shown} is not the "
            f"actor's {shape.vocab_size}",
            flag=flag,
            remedy="set it to token",
        )
    if k > own.vocab_size:
        raise UsageError(
            f"is more than the vocabulary of {own.vocab_size}",
            flag=f"--rl-teacher-top-k {k}",
            remedy="lower it",
        )
    return own


def _read_folder(
    teacher: TeacherPlace, own_shape: ModelShape, actor: Path, *, trusts: bool
) -> HFCheckpoint:
    """Read the tensors of the teacher's folder, and compare its tokenizer with the actor's."""
    folder = Path(teacher.place)
    checkpoint = open_checkpoint(folder, own_shape, flag=teacher.flag)
    check_tensors(checkpoint, own_shape, flag=teacher.flag)
    check_same_vocabulary(
        folder, actor, num_rows=own_shape.vocab_size, flag=teacher.flag, trusts=trusts
    )
    return checkpoint


def check_same_vocabulary(
    teacher: Path, actor: Path, *, num_rows: int, flag: str = _FLAG, trusts: bool = False
) -> None:
    """Check that each token of the actor's tokenizer is the same token of the teacher's, whose
    model has `num_rows`. With `trusts` a tokenizer's own code may run."""
    folders = teacher, actor
    theirs, ours = map(_vocabulary_of_file, folders)
    if not theirs or not ours:  # other files: transformers reads them
        try:
            theirs, ours = (_vocabulary_of_process(each, trusts=trusts) for each in folders)
        except (UsageError, RejectedRow, ProcessEnded) as error:
            raise UsageError(
                f"has a tokenizer that cannot be compared with that of {actor} ({error})",
                flag=f"{flag} {teacher}",
                remedy="add the tokenizer.json of both, or give a teacher that has it",
            ) from error
    for text, token in ours.items():
        if theirs.get(text) != token:
            has = f"has {theirs[text]}" if text in theirs else "lacks it"
            raise UsageError(
                f"has another tokenizer: {text!r} is token {token} of {actor}, and the teacher "
                f"{has}",
                flag=f"{flag} {teacher}",
                remedy="give a teacher with the actor's tokenizer",
            )
    if (largest := max(ours.values())) >= num_rows:
        raise UsageError(
            f"has a vocabulary of {num_rows}, and token {largest} is one of the actor's tokenizer",
            flag=f"{flag} {teacher}",
            remedy="give a teacher with the actor's tokenizer",
        )


def _vocabulary_of_process(folder: Path, *, trusts: bool) -> Mapping[str, int]:
    process = tokenizer_process(
        folder, ChatTemplate(), use_template=False, trust_remote_code=trusts
    )
    return process.vocabulary()


def _vocabulary_of_file(folder: Path) -> Mapping[str, int]:
    """Return text -> token of tokenizer.json; empty if the file cannot be read."""
    tokens: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        contents = parse_json((folder / "tokenizer.json").read_bytes())
        vocabulary = contents["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens.update(vocabulary)
        else:  # Unigram: a list of [text, score]
            tokens.update({text: token for token, (text, _) in enumerate(vocabulary)})
        tokens.update({each["content"]: each["id"] for each in contents["added_tokens"]})
    return tokens


def teacher_spec(
    read: ReadTeacher, laid_out: LaidOut, facts: Facts, extra_args: ExtraArgs
) -> TeacherSpec | None:
    """Return the description of a teacher; None if something that it needs was refused."""
    actor, roles = facts.actor, facts.roles
    if read.checkpoint is None or actor is None or roles is None:
        return None
    in_turn = not roles.is_separate(TEACHER)
    return TeacherSpec(
        shape=read.shape,
        checkpoint=read.checkpoint,
        layout=laid_out.layout,
        layers=laid_out.layers,
        tokens=laid_out.tokens,
        extra_args=extra_args,
        is_swapped=in_turn and is_swapped(laid_out, actor.shape, actor.layout),
    )


def check_teacher_servers(spec: JobSpec) -> list[str]:
    """Check the servers of teachers; return why some do not answer, since they may still start.

    Raises UsageError for a server that takes too few tokens, and for one with another tokenizer or
    one that cannot be compared.
    """
    servers = [each for each in spec.config.teachers if each.url is not None]
    if not servers:
        return []
    process = TokenizerProcess(
        spec.checkpoint.folder,
        version="",
        trust_remote_code=spec.trust_remote_code,
        use_template=False,
    )
    (ours,) = process.encode([_SAMPLE], special=False)
    close_all()
    reasons = (_check_server(each, spec, ours) for each in servers)
    return [reason for reason in reasons if reason is not None]


def _check_server(teacher: TeacherPlace, spec: JobSpec, ours: Sequence[int]) -> str | None:
    """Check one server; `ours` are the tokens of a text. Return what is not checked, and why."""
    config = spec.config
    header = header_from(config.teacher.teacher_header_env, "--rl-teacher-header-env")
    client = PromptScores(teacher.place, header)
    most, note = None, None
    try:
        most = client.max_tokens()
    except HTTPFailure as failure:
        if failure.may_pass:
            return f"{teacher.place} is not checked: {failure}"
        note = f"the length that {teacher.place} takes is not checked: {failure}"
    try:
        theirs = client.tokens_of(_SAMPLE)
    except HTTPFailure as failure:
        if failure.may_pass and failure.status is None:
            return f"{teacher.place} is not checked: {failure}"
        raise UsageError(
            f"has a tokenizer that cannot be compared with that of {spec.checkpoint.folder} "
            f"(/tokenize: {failure})",
            flag=teacher.shown,
            remedy="serve it by vllm serve without --skip-tokenizer-init, or give the teacher's "
            "folder",
        ) from None
    least = config.data.max_prompt_tokens + config.rollout.max_response_tokens + 1
    if most is not None and most < least:
        raise UsageError(
            f"takes {most} tokens, and a prompt, a response and one more token have up to {least}",
            flag=teacher.shown,
            remedy=f"start its vllm serve with --max-model-len {least}",
        )
    if list(ours) != list(theirs):
        shown = json.dumps(_SAMPLE[:20])
        raise UsageError(
            f"has another tokenizer than {spec.checkpoint.folder}: a text that begins {shown} has "
            f"{len(theirs)} tokens there and {len(ours)} here, which differ",
            flag=teacher.shown,
            remedy="serve a teacher with the actor's tokenizer",
        )
    return note
