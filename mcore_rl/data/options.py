"""Options of prompts and demonstrations."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters, param
from mcore_rl.data.sources import EVAL_PROMPTS, SourceSpec, parse_sources

NO_CURRICULUM, DROP, DRAW_LESS = "off", "drop", "less"

STOP, RESTART, CONTINUE = "stop", "restart", "continue"  # of --rl-on-changed-prompts
_USES_TEMPLATE = {"no_chat_template": "that flag uses no template"}
SKIP = "skip"  # of --rl-bad-rows, beside STOP

ALL, LAST = "all", "last"  # of --rl-sft-loss-on


@dataclass(frozen=True, slots=True)
class DataOptions(Parameters):
    """The flags of prompts: their files, and how rows become prompts."""

    prompts: str | None = param(
        None,
        "JSONL or Parquet file of training prompts; several as a.jsonl=0.7,b.parquet=0.3, or a "
        "YAML file of sources with options of their own (docs/using/prompts.md)",
    )
    eval_prompts: str | None = param(
        None,
        "JSONL or Parquet file of held-out prompts; several as NAME=a.jsonl,NAME=b.jsonl, or a "
        "YAML file of sources",
    )
    prompt_column: str = param("prompt", "column that holds the prompt (text or chat messages)")
    answer_column: str = param("answer", "column that holds the reference answer for the reward")
    no_chat_template: bool = param(
        False, "use prompts as they are in the file, without a chat template"
    )
    chat_template: str | None = param(
        None,
        "name of one of the tokenizer's chat templates, or a .jinja file",
        excludes=_USES_TEMPLATE,
    )
    chat_template_kwargs: str = param(
        "{}", "arguments of the chat template, a JSON object", excludes=_USES_TEMPLATE
    )
    max_prompt_tokens: int = param(512, "drop and count prompts that are longer", above=0)
    bad_rows: str = param(
        STOP,
        "what a row does that cannot be used: stop ends the start with its line; skip leaves it "
        "out, and the log counts such rows by reason",
        choices=(STOP, SKIP),
    )
    curriculum: str = param(
        NO_CURRICULUM,
        "prompts whose responses were all right or all wrong when they were last drawn: drop them, "
        "or draw them less often, in one of four epochs",
        choices=(NO_CURRICULUM, DROP, DRAW_LESS),
    )
    cache_dir: str | None = param(None, "folder that caches tokenized prompts")
    on_changed_prompts: str = param(
        STOP,
        "what a resume does if --rl-prompts differ from the checkpoint's: stop; restart: begin "
        "with the first prompt of each source; continue: sources with the same prompts continue "
        "where they were, others begin with the first",
        choices=(STOP, RESTART, CONTINUE),
    )

    def train_sources(self) -> tuple[SourceSpec, ...]:
        """Return the sources of `prompts`. Raises UsageError without them."""
        if self.prompts is None:
            remedy = "give a JSONL or Parquet file of prompts"
            raise UsageError("is missing", flag="--rl-prompts", remedy=remedy)
        return parse_sources(self.prompts)

    def eval_sources(self) -> tuple[SourceSpec, ...]:
        """Return the sources of `eval_prompts`, none if they are not given. Raises UsageError."""
        return () if self.eval_prompts is None else parse_sources(self.eval_prompts, EVAL_PROMPTS)

    def all_sources(self) -> tuple[SourceSpec, ...]:
        """Return the sources of the flags that are given. Raises UsageError."""
        train = () if self.prompts is None else self.train_sources()
        return (*train, *self.eval_sources())


@dataclass(frozen=True, slots=True)
class SupervisedOptions(Parameters):
    """The flags of demonstrations: for --rl-algorithm sft, and beside reinforcement learning."""

    _flag_prefix = "sft_"

    loss_on: str = param(
        ALL,
        "turns of the assistant that demonstrations teach: all of them, or the last",
        choices=(ALL, LAST),
    )
    response_column: str = param(
        "response",
        "column that holds the response to a prompt (text or messages); without it, prompts must "
        "be conversations with the assistant's turns",
    )
    append_end: bool = param(
        False,
        "add the model's end token to learned turns that the chat template leaves without one",
        excludes={"no_chat_template": "without a template an end token follows every response"},
    )
    coef: float = param(
        0.0,
        "weight of the cross-entropy of --rl-sft-demonstrations in each update, beside the loss of "
        "the algorithm",
        least=0,
        advice="choose for example 0.1, or 0 to leave the term out",
    )
    demonstrations: str | None = param(
        None, "JSONL or Parquet file of demonstrations for --rl-sft-coef"
    )
    rows_per_step: int = param(
        16, "rows of --rl-sft-demonstrations per step, divided among its mini-batches", above=0
    )
