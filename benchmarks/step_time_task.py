"""Workloads of `step_time.py` for both systems: checkpoints, sizes and one evaluation.

`short` is the warmed tiny checkpoint: prompts of eight tokens, answers of six. `short_instructed`
is the same model, trained to answer after an instruction, which gives prompts of realistic length.
`long` is trained to continue its answer with full stops and to end after each with the same
probability: lengths are geometric, cut at the limit. The reward is `arithmetic` on the text before
the first full stop, so length has no effect on it.

`real_size` has the shape of Qwen3-0.6B and random weights: only its steps are timed. `smollm2` is
examples/smollm2: SmolLM2-135M-Instruct on small tasks in words.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from mcore_rl.rewards.functions import arithmetic  # noqa: E402

FILLER = "."
INSTRUCTION = (
    "Add the first and the second number. Let us think step by step: first write the sum of the "
    "ones as two digits, and then write the final answer. "
)
MARKER = "step_time.json"


@dataclass(frozen=True, slots=True)
class Teaching:
    """Supervised training of the warmed model before a workload."""

    num_steps: int
    num_samples: int  # a step
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes for both systems."""

    name: str
    max_response_tokens: int
    num_prompts_per_step: int
    num_samples_per_prompt: int
    num_steps: int
    num_eval_prompts: int
    learning_rate: float = 1e-4
    max_prompt_tokens: int = 24
    num_trial_prompts: int = 1  # per step, where TRL's precision is chosen
    packed_tokens: int = 0  # of ours in a micro-batch; 0: all samples of a rank, padded
    instruction: str = ""  # before every sum
    teaching: Teaching | None = None  # None: the warmed model as it is
    taught: str = ""  # name of the trained model
    mean_response_tokens: float = 0.0  # with tails; 0: half of the limit
    aimed_ratio: float = 1.0  # samples per second, ours over TRL's
    random_model: str = ""  # a case of real_size.py; "": a model that knows the task
    precision: str = ""  # of both systems; "": of each the faster one
    num_processes: int = 0  # of ours; 0: --processes
    is_published: bool = False  # SmolLM2-135M-Instruct, by defaults and by the best settings

    @property
    def reward_name(self) -> str:
        """The value of --rl-reward."""
        return "arithmetic" if self.is_published else "benchmarks.step_time_task:reward"

    @property
    def samples_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_samples_per_prompt

    def flags(self, checkpoint: Path, run_dir: Path, *, precision: str, seed: int) -> list[str]:
        """Return the flags of a run of mcore_rl that all benchmarks share."""
        cache = "" if self.is_published else "--rl-rollout-kv-cache-gib 0.25 "
        return (
            f"--rl-hf-checkpoint {checkpoint} --rl-max-prompt-tokens {self.max_prompt_tokens} "
            f"--rl-max-response-tokens {self.max_response_tokens} "
            f"--rl-num-prompts-per-step {self.num_prompts_per_step} "
            f"--rl-num-samples-per-prompt {self.num_samples_per_prompt} "
            f"--lr {self.learning_rate} --rl-precision {precision} --seed {seed} "
            f"{cache}--rl-run-dir {run_dir}"
        ).split()

    @property
    def has_tails(self) -> bool:
        return self.max_response_tokens > _SHORT.max_response_tokens


_SHORT = Workload(
    "short",
    max_response_tokens=16,
    num_prompts_per_step=16,
    num_samples_per_prompt=8,
    num_steps=16,
    num_eval_prompts=256,
    num_trial_prompts=16,
    packed_tokens=2048,
    aimed_ratio=1.2,
)
_LONG = Workload(
    "long",
    max_response_tokens=200,
    num_prompts_per_step=8,
    num_samples_per_prompt=8,
    num_steps=4,
    num_eval_prompts=256,
    packed_tokens=2048,
    aimed_ratio=8.0,
    teaching=Teaching(num_steps=100, num_samples=8, learning_rate=5e-4),
    taught="long",
    # Small, as lengths would drift at random, to another mean in each system.
    learning_rate=1e-5,
)
_INSTRUCTED = dataclasses.replace(
    _SHORT,
    name="short_instructed",
    instruction=INSTRUCTION,
    teaching=Teaching(num_steps=250, num_samples=32, learning_rate=1e-3),
    taught="instructed",
    max_prompt_tokens=64,
    packed_tokens=4096,
)
# The same with four times the samples per step: fixed costs of a step count less.
_SHORT_512 = dataclasses.replace(
    _SHORT, name="short_512", num_prompts_per_step=64, num_steps=8, packed_tokens=4096
)
_LONG_256 = dataclasses.replace(_LONG, name="long_256", num_prompts_per_step=32, num_steps=3)
# Its responses are random and have no reward, which does not change a step's cost. One process, as
# each has the complete model and an engine's copy of it.
_REAL_SIZE = Workload(
    "real_size",
    max_response_tokens=32,
    num_prompts_per_step=4,
    num_samples_per_prompt=4,
    num_steps=4,
    num_eval_prompts=0,
    learning_rate=1e-6,
    packed_tokens=1024,
    random_model="dense",
    precision="fp32",
    num_processes=1,
)
_SMOLLM2 = Workload(
    "smollm2",
    max_response_tokens=24,
    num_prompts_per_step=16,
    num_samples_per_prompt=8,
    num_steps=4,
    num_eval_prompts=144,
    learning_rate=2e-5,
    max_prompt_tokens=64,
    aimed_ratio=4.0,
    num_processes=1,
    is_published=True,
)
WORKLOADS = (_SHORT, _INSTRUCTED, _SHORT_512, _LONG, _LONG_256, _REAL_SIZE, _SMOLLM2)
LEFT_OUT_STEPS = 2  # at the start: caches, connections and allocators are still being filled


def quick(workload: Workload) -> Workload:
    """Return the workload with as few steps as leave one that counts."""
    return dataclasses.replace(
        workload,
        num_steps=LEFT_OUT_STEPS + 1,
        num_eval_prompts=min(workload.num_eval_prompts, 16),
    )


def trial(workload: Workload) -> Workload:
    """Return the smallest workload that shows which of two settings is faster."""
    return dataclasses.replace(
        workload,
        num_steps=LEFT_OUT_STEPS + 1,
        num_prompts_per_step=workload.num_trial_prompts,
        max_response_tokens=min(workload.max_response_tokens, 64),
    )


def stop_probability(mean: float, limit: int) -> float:
    """p of a geometric length, cut at `limit`, whose mean is `mean`: (1 - (1-p)^limit) / p."""
    if not 1.0 < mean < limit:
        raise ValueError(f"a mean of {mean} is not between 1 and the limit {limit}")
    low, high = 1e-9, 1.0
    for _ in range(100):
        middle = math.sqrt(low * high)
        too_long = -math.expm1(limit * math.log1p(-middle)) / middle > mean
        low, high = (middle, high) if too_long else (low, middle)
    return high


def cache_folder() -> Path:
    """Return the folder in which scripts/run_deepseek_moe.sh keeps the tiny checkpoint."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MCORE_RL_CACHE") or Path(base) / "mcore_rl")


def checkpoint_of(workload: Workload) -> Path:
    """Return the folder of the workload's checkpoint. The first call takes minutes."""
    import make_smollm2
    from make_tiny_deepseek import make_checkpoint

    if workload.is_published:
        return make_smollm2.make_checkpoint(cache_folder() / "smollm2_135m_instruct")
    if workload.random_model:
        from benchmarks import real_size

        folder = cache_folder() / f"step_time_{workload.name}"
        return real_size.make_checkpoint(real_size.CASES[workload.random_model], folder)
    warmed = make_checkpoint(cache_folder() / "tiny_deepseek_v3", warm_up=True)
    if workload.teaching is None:
        return warmed
    folder = cache_folder() / f"step_time_{workload.taught}"
    recipe = {
        "source": inspect.getsource(_teach) + inspect.getsource(stop_probability),
        "constants": [FILLER, workload.instruction, workload.max_response_tokens, _mean(workload)],
        "teaching": dataclasses.asdict(workload.teaching),
        "of": (warmed / "complete.json").read_text(),
    }
    marker = folder / MARKER
    if not (marker.is_file() and json.loads(marker.read_text()) == recipe):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(warmed, folder)
        for file in (folder / "prompts").glob("*.jsonl"):
            _instruct(file, workload.instruction)
        _teach(folder, workload)
        marker.write_text(json.dumps(recipe))
    return folder


def _mean(workload: Workload) -> float:
    return workload.mean_response_tokens or workload.max_response_tokens / 2


def _instruct(file: Path, instruction: str) -> None:
    rows = [{**row, "prompt": instruction + row["prompt"]} for row in rows_of(file)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _teach(folder: Path, workload: Workload) -> None:
    """Train the model in `folder` on its own demonstrations: with the instruction before them, or
    with a tail of full stops behind them."""
    import tiny_task
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config_text = (folder / "config.json").read_text()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    teaching = workload.teaching
    assert teaching is not None
    (filler,) = tokenizer.encode(FILLER)
    problems, _ = tiny_task.split_problems(1234)
    chats = [
        [{"role": "user", "content": workload.instruction + problem.prompt}] for problem in problems
    ]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    generator = torch.Generator().manual_seed(0)
    answer_length = tiny_task.NUM_ANSWER_TOKENS - 1
    limit = workload.max_response_tokens
    stop = stop_probability(_mean(workload) - answer_length, limit - answer_length)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(teaching.num_steps):
        rows, targets = [], []
        drawn = torch.randint(len(problems), (teaching.num_samples,), generator=generator)
        for index in drawn.tolist():
            careless = torch.rand((), generator=generator) < tiny_task.SHARE_CARELESS
            problem = problems[index]
            answer = tokenizer.encode(
                problem.careless_answer if careless else problem.worked_answer
            )
            # A tail that does not end within the limit is shown without its end.
            tail = int(torch.empty(()).geometric_(stop, generator=generator)) - 1
            tail *= workload.has_tails
            shown = answer + [filler] * tail + [tokenizer.eos_token_id]
            shown = shown[:limit]
            rows.append(prompts[index] + shown)
            targets.append([-100] * len(prompts[index]) + shown)
        width = max(len(row) for row in rows)
        token_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in targets])
        logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels[:, 1:], reduction="none"
        )
        start = len(prompts[0]) - 1
        # Two means: a hundred full stops must not drown five digits. The end is one of the tail.
        answers = losses[:, start : start + answer_length].mean()
        tails = losses[:, start + answer_length :].sum()
        num_tails = (labels[:, 1 + start + answer_length :] != -100).sum()
        optimizer.zero_grad()
        (answers + tails / num_tails).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            rest = min(1.0, 2 * (1 - step / teaching.num_steps))
            group["lr"] = teaching.learning_rate * min(rest, (step + 1) / 10)
        optimizer.step()
        if step % 10 == 0:
            print(
                f"teaching {workload.name}: step {step} of {teaching.num_steps}, loss of answers "
                f"{answers:.3f}, of tails {tails / num_tails:.3f}",
                flush=True,
            )
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(config_text)  # as published, as make_tiny_deepseek does


def reward(*, prompt: str, response: str, answer: str) -> float:
    """Score the text before the first full stop with `arithmetic`, in both systems."""
    return arithmetic(prompt=prompt, response=response.split(FILLER)[0], answer=answer)


def rows_of(file: Path) -> list[dict[str, str]]:
    """Return the prompts and answers of a JSONL file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def held_out_accuracy(checkpoint: Path, heldout: Path, workload: Workload) -> float | None:
    """Return the share of correct greedy answers to held-out prompts; None without prompts.

    Computed by transformers with bfloat16 weights and float32 arithmetic, for both systems.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not workload.num_eval_prompts:
        return None
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model = model.float().eval()
    rows = rows_of(heldout)[: workload.num_eval_prompts]
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    tokenizer.padding_side = "left"
    asked = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        # What follows an answer and its end changes no reward, or (a number) would be wrong.
        most = max(16, workload.max_response_tokens if workload.is_published else 0)
        found = model.generate(**asked, do_sample=False, max_new_tokens=most)
    width = asked["input_ids"].shape[1]
    texts = tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)
    score = reward_of(workload)
    found_rewards = [
        score(prompt=row["prompt"], response=text, answer=row["answer"])
        for row, text in zip(rows, texts, strict=True)
    ]
    return sum(value >= 1.0 for value in found_rewards) / len(found_rewards)


def reward_of(workload: Workload) -> Callable[..., float]:
    """Return the function that `Workload.reward_name` names."""
    return arithmetic if workload.is_published else reward


def trl_reward_of(workload: Workload) -> Callable[..., list[float]]:
    """Return the workload's reward in TRL's calling convention."""
    score = reward_of(workload)

    def trl_reward(completions: list[Any], answer: list[str], **unused: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [
            score(prompt="", response=text, answer=right)
            for text, right in zip(texts, answer, strict=True)
        ]

    return trl_reward
