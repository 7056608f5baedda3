"""Prompts, rewards and environment of a job: the checks of a start, the rows, and a trial."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.common.variables import variables
from mcore_rl.config import RLConfig
from mcore_rl.data.demonstrations import Demonstrations
from mcore_rl.data.prompt_file import check_prompts as count_prompts
from mcore_rl.data.prompts import PromptDataset, PromptSources, example_lines, prompt_source
from mcore_rl.job.facts import Facts
from mcore_rl.job.inputs import Check, Data, examine
from mcore_rl.tools.doctor.finding import Finding, Report, green, plural, yellow
from mcore_rl.tools.doctor.reward import few_of, try_environment, try_rewards
from mcore_rl.trainer.resume.point import with_known_prompts
from mcore_rl.trainer.resume.trainer_state import TRAINER, read_trainer_state

# Checks of a start that report nothing if they pass: area, and what is then known.
_PASSED = {
    "servers": ("network", "the servers answer and fit the job"),
    "teachers": ("network", "the teachers' servers answer and fit the job"),
}


def run(report: Report, checks: Iterable[Check]) -> None:
    """Run checks of a start and report how each ended, and what it warned of."""
    first = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # other ranks check less
    with variables(first), report.listening():
        for name, error in examine(checks):
            area, passed = _PASSED.get(name, (name, ""))
            before = len(report.findings)
            report.settle(area, error)
            if passed and len(report.findings) == before:
                report.findings.append(green(area, passed))


def examine_data(report: Report, facts: Facts, resumed: Path | None = None) -> None:
    """Examine prompts, rewards and the environment by the checks of a start; describe the prompts;
    try the rewards. `resumed` is the checkpoint that the run resumes from."""
    config = facts.config
    assert config is not None, "the flags can be read"
    folder = config.trainer.hf_checkpoint
    if folder is None or not os.path.isdir(folder):
        report.add("prompts", lambda: _counted(config))
        return
    data = Data(
        *(config, facts.rewards, facts.environment, Path(folder)),
        trust_remote_code=bool(facts.known.get("trust_remote_code")),
        load=facts.known.get("load"),
        write_cache=False,
    )
    run(report, data.checks())
    rows = data.train
    if rows is not None:
        report.add("prompts", lambda: described(data))
        if resumed is not None and (resumed / TRAINER).is_dir():
            report.add("prompts", lambda: _same_as_before(data, resumed))
    rewards, environment, model = facts.rewards, facts.environment, facts.reward_model_folder
    if model is not None:
        what = f"model: {model.checkpoint.folder}, {model.shape.architecture} with a score head"
        report.findings.append(green("reward", what))
    if not config.has_engines or report.has_red("reward"):
        return
    if not isinstance(rows, PromptSources):
        what = "no prompt can be read to try the reward on"
        report.findings.append(yellow("reward", what, "correct the prompts first"))
        return
    few = few_of(rows)
    if environment is not None:
        report.add("reward", lambda: try_environment(environment, few))
    if rewards is not None:
        report.add("reward", lambda: try_rewards(rewards, few))


def _counted(config: RLConfig) -> Iterator[Finding]:
    """Count the rows of files that cannot be tokenised."""
    what = "the rows of --rl-prompts"
    if config.has_engines:
        specs = (*config.data.train_sources(), *config.data.eval_sources())
        what = plural(sum(count_prompts(prompt_source(config.data, each)) for each in specs), "row")
    what += " cannot be tokenised: there is no checkpoint with a tokenizer"
    yield yellow("prompts", what, "give its folder as --rl-hf-checkpoint")


def described(data: Data) -> Iterator[Finding]:
    """Describe the rows that a run learns from, and warn of what is unlikely to be meant."""
    for flag, rows in (("--rl-prompts", data.train), ("--rl-eval-prompts", data.held_out)):
        if isinstance(rows, PromptSources):
            for spec, part in zip(rows.specs, rows.parts, strict=True):
                yield from _described(part, f"{flag} {spec.path}" if spec.name else flag)
        elif rows is not None:
            yield from _described(rows, flag)
    if not isinstance(data.train, PromptSources):
        return
    count, per_step = len(data.train), data.config.trainer.num_prompts_per_step
    if count < per_step:
        what = f"a step draws {per_step} prompts of {count}, some twice"
        yield yellow("prompts", what, "give more, or lower --rl-num-prompts-per-step")
    if data.held_out is None:
        return
    known, held_out = _texts(data.train), _texts(data.held_out)
    if both := sum(text in known for text in held_out.elements()):
        of_all = f"{both:,} of {plural(held_out.total(), 'prompt')}"
        what = f"{of_all} of --rl-eval-prompts are in --rl-prompts"
        remedy = "hold them out, or read eval/accuracy as an accuracy of training"
        yield yellow("prompts", what, remedy)
    else:
        yield green("prompts", "no prompt of --rl-eval-prompts is one of --rl-prompts")


def _texts(rows: Any) -> Counter[str]:
    return Counter(rows[position].text for position in range(len(rows)))


def _described(rows: PromptDataset, flag: str) -> Iterator[Finding]:
    """Describe the rows of a file."""
    positions, learned, to_learn = range(len(rows)), "", "«the response is learned»"
    if isinstance(rows, Demonstrations):
        lengths = [sum(each) for position in positions for each in rows.lengths(position)]
        share = sum(sum(rows.num_learned(position)) for position in positions) / sum(lengths)
        learned, to_learn = f"; {share:.0%} are learned", ""
    else:
        prompts = [rows[position] for position in positions]
        lengths = [len(row.token_ids) for row in prompts]
    what = f"{flag}: {plural(len(rows), 'row')} of {min(lengths)} to {max(lengths)} tokens, median "
    yield green("prompts", f"{what}{np.median(lengths):.0f}{learned}")
    for line in example_lines(rows):
        yield green("prompts", f"{flag}, {line}{to_learn}")
    if isinstance(rows, Demonstrations):
        return
    if empty := sum(not row.answer_text.strip() for row in prompts):
        what = f"{flag}: {plural(empty, 'prompt')} without an answer"
        yield yellow("prompts", what, "add it unless the reward does not need it")
    texts = {row.text for row in prompts}
    if copies := len(prompts) - len(texts):
        what = f"{flag}: {plural(copies, 'row')} with the prompt of another"
        if other := len({(row.text, row.answer_text) for row in prompts}) - len(texts):
            what += f", {other:,} with another answer"
        yield yellow("prompts", what, "remove them unless they are meant to count twice")


def _same_as_before(data: Data, resumed: Path) -> Iterator[Finding]:
    """Compare the prompts with those of the checkpoint as a start does, which warns or refuses."""
    rows, state = data.train, read_trainer_state(resumed / TRAINER)
    assert rows is not None
    with_known_prompts(state, data.config, rows, data.held_out)
    if rows.follow(state.prompts):
        what = f"{resumed} is of another kind of training: the first prompt is next"
        yield green("prompts", what)
    elif rows.are_those_of(state.prompts):
        yield green("prompts", f"the prompts are those of {resumed}")
