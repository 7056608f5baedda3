"""Check of the prompts, read and tokenised as in training. It only writes a temporary file."""

from __future__ import annotations

import functools
import os
from collections import Counter
from pathlib import Path

import numpy as np

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.data.prompt_file import PromptSource
from mcore_rl.data.prompt_file import check_prompts as count_prompts
from mcore_rl.data.prompts import PromptDataset, load_prompts
from mcore_rl.data.tokenizer import HOW_TO_END, missing_end
from mcore_rl.tools.doctor.finding import PROMPTS, Finding, green, plural, red, refusal, yellow
from mcore_rl.trainer.inputs import check_code_tests, prompt_source
from mcore_rl.trainer.resume.trainer_state import (
    TRAINER,
    date_of_checkpoints,
    read_trainer_state,
)

_FEW = 2


def check_prompts(
    config: RLConfig, resumed: Path | None = None, *, trust_remote_code: bool = False
) -> tuple[list[Finding], list[Prompt]]:
    """Return findings about both files, and a few training prompts whose answers differ, or without
    answers if there are none. `resumed` is the checkpoint that the run resumes from,
    `trust_remote_code` is Megatron's flag."""
    if config.data.prompts is None:
        remedy = "give a JSONL or Parquet file of prompts"
        return [red(PROMPTS, "--rl-prompts is missing", remedy)], []
    findings: list[Finding] = []
    day = None if resumed is None else date_of_checkpoints(resumed.parent)
    open_source = functools.partial(
        prompt_source, config, trust_remote_code=trust_remote_code, date=day
    )
    try:
        source = open_source(config.data.prompts)
    except UsageError as error:
        return [refusal(PROMPTS, error)], []
    train = _read(config, source, "--rl-prompts", findings)
    held_out = None
    if config.data.eval_prompts is not None:
        source = open_source(config.data.eval_prompts)
        held_out = _read(config, source, "--rl-eval-prompts", findings)
    if train is None:
        return findings, []
    fault = missing_end(
        Path(str(config.trainer.hf_checkpoint)), trust_remote_code=trust_remote_code
    )
    if fault is not None:
        findings.append(yellow(PROMPTS, f"{fault}: every response will be cut", HOW_TO_END))
    rows = list(map(train.__getitem__, range(len(train))))
    if len(rows) < config.trainer.num_prompts_per_step:
        what = (
            f"a step draws {config.trainer.num_prompts_per_step} prompts of {len(rows)}, some twice"
        )
        findings.append(yellow(PROMPTS, what, "give more, or lower --rl-num-prompts-per-step"))
    if held_out is not None:
        findings += _overlap(rows, held_out)
    findings += _code_tests(config, train, held_out)
    if resumed is not None and (resumed / TRAINER).is_dir():
        findings.append(_same_as_before(train, config, resumed))
    return findings, _few(rows)


def _read(
    config: RLConfig, source: PromptSource, flag: str, findings: list[Finding]
) -> PromptDataset | None:
    """Read a file's prompts; None, with a finding, if training would refuse the file."""
    try:
        if config.trainer.hf_checkpoint is None or not os.path.isdir(config.trainer.hf_checkpoint):
            rows = plural(count_prompts(source, flag), "prompt")
            what = f"{flag}: {rows}, of unknown length, as there is no checkpoint to tokenise by"
            findings.append(yellow(PROMPTS, what, "give its folder as --rl-hf-checkpoint"))
            return None
        prompts = load_prompts(
            source,
            config.trainer.hf_checkpoint,
            cache_dir=config.data.cache_dir,
            flag=flag,
            write_cache=False,
        )
    except UsageError as error:
        findings.append(refusal(PROMPTS, error))
        return None
    findings += _of_file(prompts, config, flag)
    return prompts


def _of_file(prompts: PromptDataset, config: RLConfig, flag: str) -> list[Finding]:
    rows = [prompts[row] for row in range(len(prompts))]
    lengths = np.array([len(row.token_ids) for row in rows])
    what = (
        f"{flag}: {plural(len(rows), 'prompt')} of {lengths.min()} to {lengths.max()} tokens, "
        f"{np.median(lengths):.0f} in the median"
    )
    findings = [green(PROMPTS, what)]
    if prompts.num_too_long:
        what = f"{flag}: {plural(prompts.num_too_long, 'prompt')} longer than "
        what += f"--rl-max-prompt-tokens {config.data.max_prompt_tokens} will be left out"
        findings.append(yellow(PROMPTS, what, "raise it, or take them out of the file"))
    for name, (count, first) in prompts.left_out.items():
        what = f"{flag}: the model is not given {name}, in {plural(count, 'row')}, row {first + 1} "
        remedy = "take it out of the file, or use another --rl-chat-template"
        findings.append(yellow(PROMPTS, what + "first", remedy))
    if empty := sum(not row.answer_text.strip() for row in rows):
        what = f"{flag}: {plural(empty, 'prompt')} without an answer"
        findings.append(yellow(PROMPTS, what, "fill it in unless the reward does without"))
    if copies := sum(count - 1 for count in Counter(row.text for row in rows).values()):
        what = f"{flag}: {plural(copies, 'row')} with the prompt of another"
        answers = {(row.text, row.answer_text) for row in rows}
        texts = {row.text for row in rows}
        if contradicting := len(answers) - len(texts):
            what += f", {contradicting:,} with another answer"
        findings.append(yellow(PROMPTS, what, "remove them unless they are meant to count twice"))
    return findings


def _code_tests(
    config: RLConfig, train: PromptDataset, held_out: PromptDataset | None
) -> list[Finding]:
    try:
        check_code_tests(config, train, held_out)
    except UsageError as error:
        return [refusal(PROMPTS, error)]
    except RuntimeError:  # code cannot be run here, which the check of the reward reports
        return []
    return []


def _overlap(train: list[Prompt], held_out: PromptDataset) -> list[Finding]:
    """Report prompts that are used both for training and for evaluation."""
    known = {row.text for row in train}
    both = sum(held_out[row].text in known for row in range(len(held_out)))
    if not both:
        return [green(PROMPTS, "no prompt of --rl-eval-prompts is one of --rl-prompts")]
    what = f"{both:,} of {plural(len(held_out), 'prompt')} of --rl-eval-prompts are in --rl-prompts"
    remedy = "hold them out, or take eval/accuracy for one of training"
    return [yellow(PROMPTS, what, remedy)]


def _same_as_before(train: PromptDataset, config: RLConfig, resumed: Path) -> Finding:
    are_same = train.are_those_of(read_trainer_state(resumed / TRAINER).prompts)
    if are_same:
        return green(PROMPTS, f"the prompts are those of {resumed}")
    if are_same is None:
        what = (
            f"whether the prompts are those of {resumed} is not known: an earlier version wrote it"
        )
        return yellow(PROMPTS, what, "make sure that they are")
    what = f"the prompts are others than those that {resumed} has drawn from"
    if config.data.on_changed_prompts == "stop":
        remedy = "bring them back, or begin with the new ones by --rl-on-changed-prompts restart"
        return red(PROMPTS, what, remedy)
    return yellow(PROMPTS, f"{what}, and begin with the first", "make sure that this is meant")


def _few(rows: list[Prompt]) -> list[Prompt]:
    found: dict[str, Prompt] = {}
    for row in rows:
        if row.answer_text.strip():
            found.setdefault(row.answer_text, row)
        if len(found) == _FEW:
            break
    return list(found.values()) or rows[:_FEW]
