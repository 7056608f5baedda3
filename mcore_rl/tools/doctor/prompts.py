"""Check of the prompts, read and tokenised as in training. It only writes a temporary file."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mcore_rl.batching.types import Prompt
from mcore_rl.config import RLConfig
from mcore_rl.data.assistant_turns import NO_END
from mcore_rl.data.chat import ADDED_END
from mcore_rl.data.demonstrations import Demonstrations, load_supervised_files
from mcore_rl.data.options import CONTINUE, RESTART, STOP
from mcore_rl.data.prompt_file import PromptSource
from mcore_rl.data.prompt_file import check_prompts as count_prompts
from mcore_rl.data.prompts import (
    PromptDataset,
    PromptSources,
    example_lines,
    load_prompts,
    prompt_source,
)
from mcore_rl.data.row_notes import lines_of
from mcore_rl.data.source_position import changes_between
from mcore_rl.data.sources import SourceSpec
from mcore_rl.data.tokenizer import HOW_TO_END, missing_end
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.job.inputs import check_code_tests
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.tools.doctor.finding import PROMPTS, Finding, Report, green, plural, red, yellow
from mcore_rl.trainer.resume.trainer_state import (
    TRAINER,
    date_of_checkpoints,
    read_trainer_state,
)

_FEW = 2
_REMEDIES = {
    NO_END: f"give --rl-sft-append-end, or {HOW_TO_END}",
    ADDED_END: "nothing needs to be done: what follows a prompt is the response",
}


def check_prompts(
    report: Report,
    config: RLConfig,
    rewards: RewardSpec | None,
    resumed: Path | None = None,
    *,
    environment: EnvironmentSpec | None = None,
    trust_remote_code: bool = False,
) -> list[Prompt]:
    """Report on both files; return a few training prompts whose answers differ, or without answers
    if there are none. `rewards` is None if they were refused, `resumed` is the checkpoint that the
    run resumes from, `trust_remote_code` is Megatron's flag."""
    day = None if resumed is None else date_of_checkpoints(resumed.parent)

    def read(specs: Sequence[SourceSpec]) -> PromptSources | None:
        parts = []
        for spec in specs:
            source = prompt_source(config.data, spec, trust_remote_code=trust_remote_code, date=day)
            flag = f"{source.flag} {spec.path}" if spec.name else source.flag
            folder = config.trainer.hf_checkpoint
            if folder is None or not os.path.isdir(folder):
                rows = plural(count_prompts(source), "prompt")
                what = f"{flag}: {rows}, of unknown length, as there is no checkpoint with a "
                remedy = "give its folder as --rl-hf-checkpoint"
                report.findings.append(yellow(PROMPTS, f"{what}tokenizer", remedy))
                continue
            prompts = load_prompts(
                source, folder, cache_dir=config.data.cache_dir, write_cache=False
            )
            report.findings += _of_file(prompts, source, flag)
            parts.append((spec, prompts))
        per_step = 1 if specs and specs[0].is_eval else config.trainer.num_prompts_per_step
        is_whole = specs and len(parts) == len(specs)
        return PromptSources(parts, per_step=per_step) if is_whole else None

    train = held_out = None
    with report.catching(PROMPTS):
        train = read(config.data.train_sources())
    with report.catching(PROMPTS):
        held_out = read(config.data.eval_sources())
    if train is None:
        return []
    rows = [train[row] for row in range(len(train))]
    fault = missing_end(
        Path(str(config.trainer.hf_checkpoint)), trust_remote_code=trust_remote_code
    )
    if fault is not None:
        what = f"{fault}: every response will be cut"
        report.findings.append(yellow(PROMPTS, what, HOW_TO_END))
    report.findings += _together(rows, held_out, config)
    if rewards is not None:
        # Where code cannot be run, the check of the reward reports it.
        with report.catching(PROMPTS), contextlib.suppress(RuntimeError):
            check_code_tests(rewards, environment, train, held_out)
    if resumed is not None and (resumed / TRAINER).is_dir():
        report.findings.append(_same_as_before(train, config, resumed))
    return _few(rows)


def check_demonstrations(
    report: Report,
    config: RLConfig,
    resumed: Path | None = None,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Report on both files of supervised training; the arguments are those of `check_prompts`."""
    folder = config.trainer.hf_checkpoint
    if folder is None or not os.path.isdir(folder):
        what = "the rows of --rl-prompts are not examined without the tokenizer of a checkpoint"
        report.findings.append(yellow(PROMPTS, what, "give its folder as --rl-hf-checkpoint"))
        return
    with report.catching(PROMPTS):
        train, held_out = load_supervised_files(
            *(config.recipe.trains_on, folder, config.data, config.supervised),
            max_response_tokens=config.rollout.max_response_tokens,
            trust_remote_code=trust_remote_code,
            date=None if resumed is None else date_of_checkpoints(resumed.parent),
            write_cache=False,
        )
        for rows, flag in ((train, "--rl-prompts"), (held_out, "--rl-eval-prompts")):
            if rows is not None:
                report.findings += _of_demonstrations(rows, config, flag)
        if resumed is not None and (resumed / TRAINER).is_dir():
            report.findings.append(_same_as_before(train, config, resumed))


def _of_demonstrations(rows: Demonstrations, config: RLConfig, flag: str) -> Iterator[Finding]:
    samples = [
        rows.tokens(position, sample).is_generated
        for position in range(len(rows))
        for sample in range(rows.samples_per_row)
    ]
    lengths = np.array([len(each) for each in samples])
    share = sum(int(each.sum()) for each in samples) / lengths.sum()
    what = f"{flag}: {plural(len(rows), 'row')} of {lengths.min()} to {lengths.max()} tokens"
    yield green(PROMPTS, f"{what}, median {np.median(lengths):.0f}; {share:.0%} are learned")
    for line in example_lines(rows):
        yield green(PROMPTS, f"{flag}, {line}")
    yield from _left_out(rows, flag, "--rl-max-prompt-tokens and --rl-max-response-tokens together")


def _of_file(prompts: PromptDataset, source: PromptSource, flag: str) -> Iterator[Finding]:
    rows = [prompts[row] for row in range(len(prompts))]
    lengths = np.array([len(row.token_ids) for row in rows])
    what = f"{flag}: {plural(len(rows), 'prompt')} of {lengths.min()} to {lengths.max()} tokens"
    yield green(PROMPTS, f"{what}, median {np.median(lengths):.0f}")
    for line in example_lines(prompts):
        yield green(PROMPTS, f"{flag}, {line}«the response is learned»")
    yield from _left_out(prompts, flag, f"--rl-max-prompt-tokens {source.max_prompt_tokens}")
    if empty := sum(not row.answer_text.strip() for row in rows):
        what = f"{flag}: {plural(empty, 'prompt')} without an answer"
        yield yellow(PROMPTS, what, "add it unless the reward does not need it")
    if copies := sum(count - 1 for count in Counter(row.text for row in rows).values()):
        what = f"{flag}: {plural(copies, 'row')} with the prompt of another"
        answers = {(row.text, row.answer_text) for row in rows}
        if contradicting := len(answers) - len({text for text, _ in answers}):
            what += f", {contradicting:,} with another answer"
        yield yellow(PROMPTS, what, "remove them unless they are meant to count twice")


def _left_out(prompts: PromptDataset, flag: str, limit: str) -> Iterator[Finding]:
    """Report rows that cannot be used or are too long, and fields that the model does not get."""
    for line in lines_of(prompts.bad_rows, prompts.num_rows):
        yield yellow(PROMPTS, f"{flag}: {line}", "correct them, or train without them")
    if prompts.num_too_long:
        what = f"{flag}: {plural(prompts.num_too_long, 'prompt')} longer than {limit} will be left "
        yield yellow(PROMPTS, what + "out", "raise it, or remove them from the file")
    for name, (count, first) in prompts.left_out.items():
        what = f"{flag}: the model is not given {name}, in {plural(count, 'row')}, row {first + 1} "
        remedy = _REMEDIES.get(name, "remove it from the file, or use another --rl-chat-template")
        yield yellow(PROMPTS, what + "first", remedy)


def _together(
    rows: Sequence[Prompt], held_out: PromptSources | None, config: RLConfig
) -> Iterator[Finding]:
    """Report too few prompts, and those used both for training and for evaluation."""
    if len(rows) < config.trainer.num_prompts_per_step:
        what = (
            f"a step draws {config.trainer.num_prompts_per_step} prompts of {len(rows)}, some twice"
        )
        yield yellow(PROMPTS, what, "give more, or lower --rl-num-prompts-per-step")
    if held_out is None:
        return
    known = {row.text for row in rows}
    if both := sum(held_out[row].text in known for row in range(len(held_out))):
        of_all = f"{both:,} of {plural(len(held_out), 'prompt')}"
        what = f"{of_all} of --rl-eval-prompts are in --rl-prompts"
        yield yellow(
            PROMPTS, what, "hold them out, or read eval/accuracy as an accuracy of training"
        )
    else:
        yield green(PROMPTS, "no prompt of --rl-eval-prompts is one of --rl-prompts")


def _same_as_before(
    train: PromptSources | Demonstrations, config: RLConfig, resumed: Path
) -> Finding:
    before = read_trainer_state(resumed / TRAINER).prompts
    if train.follow(before):
        return green(PROMPTS, f"{resumed} is of another kind of training: the first prompt is next")
    are_same = train.are_those_of(before)
    if are_same:
        return green(PROMPTS, f"the prompts are those of {resumed}")
    if are_same is None:
        what = f"whether the prompts are those of {resumed} is unknown: an earlier version wrote "
        return yellow(PROMPTS, f"{what}it", "make sure that they are")
    why = changes_between(before, train.fingerprint)
    what = f"the prompts are not those that {resumed} was trained on{f' ({why})' if why else ''}"
    if config.data.on_changed_prompts == STOP:
        remedy = f"bring them back, or give --rl-on-changed-prompts {RESTART} or {CONTINUE}"
        return red(PROMPTS, what, remedy)
    then = "begin with the first"
    if config.data.on_changed_prompts == CONTINUE:
        then = "those that are the same continue"
    return yellow(PROMPTS, f"{what}, and {then}", "make sure that this is meant")


def _few(rows: Sequence[Prompt]) -> list[Prompt]:
    """Return for each source a few prompts whose answers differ, or any without answers."""
    by_source: dict[str, dict[str, Prompt]] = {row.source: {} for row in rows}
    for row in rows:
        if row.answer_text.strip() and len(by_source[row.source]) < _FEW:
            by_source[row.source].setdefault(row.answer_text, row)
    few: list[Prompt] = []
    for source, answered in by_source.items():
        few += answered.values() or [row for row in rows if row.source == source][:_FEW]
    return few
