"""TRL's side of `rollout_trl.py`, in a separate process: prints one JSON object.

    python benchmarks/rollout_trl_agent.py CHECKPOINT PROMPTS OUT [--precision fp32] [--seed 1]

TRL's tool loop runs the episodes (`environment_factory`, as of trl 1.16.0). It generates a turn for
all open samples, parses the calls, executes them one after the other in its process, appends their
results, and repeats until there are no calls. The tokenizer defines calls and results. Here they
follow the task, so that both systems read and write the same tokens and get the same rewards:

- a turn is a call if `Calculator` continues after it, which depends on its text and the turns
  before; the tokenizer's `parse_response` decides this;
- a result is a message of role `tool`, which the chat template formats like a `user` message, as
  our calculator's messages are; the prompt omits the tools' schemas.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks.step_time_task import Workload  # noqa: E402
from mcore_rl.environments.calculator import Calculator  # noqa: E402
from mcore_rl.environments.interface import (  # noqa: E402
    EnvironmentPrompt,
    Response,
    StepResult,
)

MAX_TURNS = 4
# The policy is trained already and hardly changes: learning is not measured here.
WORKLOAD = Workload(
    "two_turns",
    max_response_tokens=24,
    num_prompts_per_step=16,
    num_samples_per_prompt=8,
    num_steps=14,
    num_eval_prompts=0,
    learning_rate=1e-6,
    packed_tokens=4096,
)
TOOL = "press"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' }}"
    "{{ message['content'] }}"
    # TRL renders calls only in examples, to check that they appear.
    "{% for call in message['tool_calls'] or [] %}"
    "{{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Pocket:
    """TRL environment around our calculator: every public method but `reset` is a tool."""

    _seconds = 0.0  # duration of a call

    def reset(self, *, prompt: Any, answer: str, memory: int, **unused: Any) -> None:
        self._reward, self._num_turns = 0.0, 0
        self._calculator = Calculator()
        row = {"answer": answer, "memory": memory}
        self._calculator.start(EnvironmentPrompt(prompt[-1]["content"], answer, row, seed=0))

    def press(self, keys: str) -> str:
        """Key in an expression.

        Args:
            keys: What to key in.

        Returns:
            What the display shows.
        """
        observation = self._step(keys).observation
        time.sleep(self._seconds)
        assert observation is not None, "a call that ends its episode"
        return str(observation[0]["content"])  # type: ignore[index]

    def _step(self, text: str) -> StepResult:
        self._num_turns += 1
        found = step_of(self._calculator, text, self._num_turns)
        self._reward += found.reward
        return found


def step_of(calculator: Calculator, text: str, turn: int) -> StepResult:
    """Return the calculator's step for a turn; it never waits, so no event loop is needed."""
    step = calculator.step(Response(text, (), turn, "stop"))
    try:
        step.send(None)
    except StopIteration as ended:
        found: StepResult = ended.value
        return found
    raise RuntimeError("the calculator waits for something")


def calls(turns: Sequence[str]) -> bool:
    """Return whether the last of an episode's `turns` is a call."""
    calculator = Calculator()
    calculator.start(EnvironmentPrompt("", "0", {"memory": 0}, seed=0))
    for number, text in enumerate(turns, 1):
        found = step_of(calculator, text, number)
    return not found.done


def turns_in(conversation: str) -> list[str]:
    """Return the texts of the assistant's turns in a conversation, the last one without an end:
    `<bos><|user|>47 ?<|assistant|>15<eos><|user|>5<|assistant|>5`."""
    parts = conversation.split("<|assistant|>")[1:]
    return [part.split("<eos>")[0].split("<|user|>")[0] for part in parts]


def make_parser_of(tokenizer: Any) -> Callable[..., dict[str, Any]]:
    """Return `parse_response` for `tokenizer`: the message of a turn, with its call if any."""

    def parse_response(ids: Sequence[int], *, prefix: Sequence[int], **unused: Any) -> Any:
        turns = turns_in(tokenizer.decode([*prefix, *ids]))
        message: dict[str, Any] = {"role": "assistant", "content": turns[-1]}
        if calls(turns):
            function = {"name": TOOL, "arguments": {"keys": turns[-1]}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message

    return parse_response


def reward(completions: Any, environments: Sequence[Pocket], **unused: Any) -> list[float]:
    """Return the episodes' rewards; a last turn that is not a call is stepped here."""
    paid = []
    for messages, environment in zip(completions, environments, strict=True):
        turns = [each["content"] for each in messages if each["role"] == "assistant"]
        if len(turns) > environment._num_turns:
            environment._step(turns[-1])
        paid.append(environment._reward)
    return paid


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path, help="a folder of TRL's")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=WORKLOAD.num_steps)
    parser.add_argument("--tool-seconds", type=float, default=0.0, help="that a call takes")
    print(json.dumps(trained(parser.parse_args())))
    return 0


def trained(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the seconds, mean tokens, turns and rewards of every step."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    Pocket._seconds = options.tool_seconds
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    from benchmarks.step_time_trl import make_clock, prompts, settings

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = {}  # that there is one; parse_response is what reads it
    tokenizer.parse_response = make_parser_of(tokenizer)
    tokens: list[float] = []
    turns: list[float] = []
    rewards: list[float] = []

    def noted(completions: Any, environments: Any, completion_ids: Any, **more: Any) -> list[float]:
        paid = reward(completions, environments)
        tokens.append(_mean([len(ids) for ids in completion_ids]))
        turns.append(_mean([environment._num_turns for environment in environments]))
        rewards.append(_mean(paid))
        return paid

    workload = dataclasses.replace(WORKLOAD, num_steps=options.steps)
    clock = make_clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32),
        reward_funcs=noted,
        args=settings(workload, options, max_tool_calling_iterations=MAX_TURNS - 1),
        train_dataset=prompts(options.prompts),
        processing_class=tokenizer,
        environment_factory=Pocket,
        callbacks=[clock],
    )
    trainer.train()
    return {
        "step_seconds": clock.step_seconds(),
        "response_tokens": tokens,
        "turns": turns,
        "rewards": rewards,
        "threads": torch.get_num_threads(),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
