"""The task of the tiny checkpoint (sums worked out on paper), its tokenizer and its warm-up.

The prompt is `47+38`. The worked answer is `15 85`: the column of ones as two digits, then the sum.
The reward reads the last integer only. All sums are below 100, so every answer has five tokens and
an end of sequence.

Not all demonstrations of the warm-up are right, on purpose: `careless_answer` forgets the carry
(`15 75`). A model trained mostly on such answers can add, but is mostly wrong when a sum carries,
so that reinforcement learning can find the rarer, right habit. This design makes a two-minute
demonstration possible; it does not show how hard this is to learn at other sizes.

torch and transformers are imported on use, so that a finished checkpoint is found at once.
Legend: b samples, s positions, r answer tokens.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 509  # prime: no degree of tensor parallelism divides it, so padding is exercised
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"  # ids 0, 1, 2
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

NUM_HELDOUT = 256
SHARE_CARRYING = 0.7  # of the prompts in either file
SHARE_CARELESS = 0.8  # of the demonstrations
NUM_ANSWER_TOKENS = 6  # "15 85" and the end of sequence

WARM_UP_STEPS = 160
WARM_UP_SAMPLES = 48  # per step
WARM_UP_SHARE_CARRYING = 0.5
MATRIX_LEARNING_RATE = 0.008
OTHER_LEARNING_RATE = 5e-3
NEWTON_SCHULZ_STEPS = 4
PROMPT_LOSS_WEIGHT = 0.1
SECONDS_BETWEEN_LINES = 5

# Training text of the tokenizer: the words of arithmetic problems.
_CORPUS = """
The sum of the numbers is how many? Add the first and the second, then take away the third.
There are seven apples in the basket and she buys five more at the market, so she has twelve.
How much money does he have left after he pays for the tickets? Each ticket costs three dollars.
If a train travels sixty miles in one hour, how far will it travel in two and a half hours?
Natural numbers, total, answer, what is, number of, times, minus, plus, equals, half, twice, a day.
They work every week and earn ten dollars an hour. After that they spend some of it on books.
A teacher gives her students four pencils each. When she is done there were eight pencils left.
Which one is larger? Let us think step by step and then write the final answer on the last line.
He sold twice as many clips in May as in April. Altogether, how many clips did he sell that year?
One, two, three, four, five, six, seven, eight, nine, ten, twenty, thirty, hundred, thousand.
""".strip()


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum of two two-digit numbers that stays below 100."""

    first: int
    second: int

    @property
    def ones(self) -> int:
        return self.first % 10 + self.second % 10

    @property
    def carries(self) -> bool:
        return self.ones >= 10

    @property
    def prompt(self) -> str:
        return f"{self.first}+{self.second}"

    @property
    def answer(self) -> str:
        return str(self.first + self.second)

    @property
    def worked_answer(self) -> str:
        return f"{self.ones:02d} {self.first + self.second}"

    @property
    def careless_answer(self) -> str:
        """The worked answer without the carry; right if nothing carries."""
        return f"{self.ones:02d} {self.first + self.second - 10 * self.carries}"


def split_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return the shuffled training and held-out problems, disjoint, `SHARE_CARRYING` in each."""
    rng = random.Random(seed)
    problems = [Problem(a, b) for a in range(10, 90) for b in range(10, 100 - a)]
    rng.shuffle(problems)
    carrying = [problem for problem in problems if problem.carries]
    plain = [problem for problem in problems if not problem.carries]
    plain = plain[: round(len(carrying) * (1 - SHARE_CARRYING) / SHARE_CARRYING)]
    num_carrying = round(NUM_HELDOUT * SHARE_CARRYING)
    num_plain = NUM_HELDOUT - num_carrying
    train = carrying[num_carrying:] + plain[num_plain:]
    heldout = carrying[:num_carrying] + plain[:num_plain]
    rng.shuffle(train)
    rng.shuffle(heldout)
    return train, heldout


def write_prompts(folder: Path, seed: int) -> None:
    """Write `train.jsonl` and `heldout.jsonl` with the columns `prompt` and `answer`."""
    folder.mkdir()
    for name, problems in zip(("train", "heldout"), split_problems(seed), strict=True):
        rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def encode_prompts(
    tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> list[list[int]]:
    """Return the ids of each prompt in the chat template, as in the trainer."""
    chats = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    encoded: Any = tokenizer.apply_chat_template(chats, add_generation_prompt=True)
    return encoded["input_ids"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of `VOCAB_SIZE` tokens; any text round-trips.

    Digits are split one by one, so a number has as many tokens as digits.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS, *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS.splitlines(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def initialize(model: Any, seed: int) -> None:
    """Set the weights for the fastest warm-up: fan-in scaled, branches damped."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)  # norms
                continue
            std = parameter.shape[-1] ** -0.5
            if "embed_tokens" in name and not tied:
                std = 0.5
            elif "o_proj" in name or "down_proj" in name:
                std *= 0.35  # they add to the residual stream
            elif "lm_head" in name:
                std *= 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def warm_up(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Train `model` (float32, in place) on demonstrations: the answers, and lightly the prompts.

    Without the prompts' share a model is certain of nonsense about tokens that it was not trained
    on, where rounding to bfloat16 shows most. Matrices are trained with Muon, in a third of AdamW's
    steps; as usual, embedding, head, routers and norms are not.
    """
    import torch

    problems, _ = split_problems(seed)
    prompts = torch.tensor(encode_prompts(tokenizer, problems))  # [problems, s - r]
    answers = torch.tensor(  # [2, problems, r]: worked, careless
        [
            [tokenizer.encode(answer) + [tokenizer.eos_token_id] for answer in kind]
            for kind in (
                [problem.worked_answer for problem in problems],
                [problem.careless_answer for problem in problems],
            )
        ]
    )
    carries = torch.tensor([float(problem.carries) for problem in problems])
    weights = torch.where(  # of the problems: few do not carry, but are learned as quickly
        carries == 1,
        WARM_UP_SHARE_CARRYING / carries.sum(),
        (1 - WARM_UP_SHARE_CARRYING) / (1 - carries).sum(),
    )
    generator = torch.Generator().manual_seed(seed)
    matrices, others = _matrices_and_others(model)
    momenta = [torch.zeros_like(matrix) for matrix in matrices]
    optimizer = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    with _one_thread():
        for step in progress(WARM_UP_STEPS):
            rows = torch.multinomial(weights, WARM_UP_SAMPLES, generator=generator)
            careless = torch.rand(WARM_UP_SAMPLES, generator=generator) < SHARE_CARELESS
            shown = answers[careless.long(), rows]
            token_ids = torch.cat([prompts[rows], shown], dim=1)
            logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits
            losses = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), token_ids[:, 1:], reduction="none"
            )
            answer = losses[:, -NUM_ANSWER_TOKENS:].mean()
            loss = answer + PROMPT_LOSS_WEIGHT * losses[:, :-NUM_ANSWER_TOKENS].mean()
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = OTHER_LEARNING_RATE * _schedule(step)
            optimizer.step()
            for matrix, momentum in zip(matrices, momenta, strict=True):
                muon_step(matrix, momentum, MATRIX_LEARNING_RATE * _schedule(step))


def _matrices_and_others(
    model: torch.nn.Module,
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return the matrices for Muon, including stacks of experts' matrices, and the rest."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        no_matrix = any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate.weight"))
        (others if parameter.dim() == 1 or no_matrix else matrices).append(parameter)
    return matrices, others


def muon_step(matrix: torch.nn.Parameter, momentum: torch.Tensor, rate: float) -> None:
    """Move `matrix` `[..., m, n]` along its orthogonalized momentum: Muon, by Keller Jordan.

    torch.optim.Muon rejects stacks, and computes in bfloat16, which many CPUs cannot multiply.
    """
    import torch

    with torch.no_grad():
        gradient = matrix.grad
        if gradient is None:  # an expert layer without tokens
            return
        momentum.lerp_(gradient, 0.05)
        update = gradient.lerp(momentum, 0.95)
        is_tall = update.shape[-2] > update.shape[-1]
        x = update.mT if is_tall else update
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(NEWTON_SCHULZ_STEPS):
            square = x @ x.mT
            x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
        scale = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
        matrix.mul_(1 - 0.01 * rate)
        matrix.add_(x.mT if is_tall else x, alpha=-rate * scale)


def _schedule(step: int) -> float:
    """Return the share of the peak learning rate: up in 20 steps, level to 40 %, down to 1/50."""
    rest = 1 - step / WARM_UP_STEPS
    return min(1.0, (step + 1) / 20) * max(0.02, min(1.0, rest / 0.6))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, for sums in a fixed order: CPU scatter-adds of several threads race.

    One is also faster: threads wait for each other at each of thousands of small operations, very
    long on a busy machine.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def progress(num_steps: int) -> Iterator[int]:
    """Count to `num_steps`, with a bar on a terminal, else with lines of the remaining time."""
    from tqdm import tqdm

    if sys.stderr.isatty():
        yield from tqdm(range(num_steps), desc="warm-up", unit="step")
        return
    started = said = time.monotonic()
    for step in range(num_steps):
        now = time.monotonic()
        if step == 0:
            print(f"warm-up step 0 of {num_steps}", flush=True)
        elif now - said >= SECONDS_BETWEEN_LINES:
            left = (now - started) / step * (num_steps - step)
            print(f"warm-up step {step} of {num_steps} · {left:.0f} s left", flush=True)
            said = now
        yield step


def sample_accuracy(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    greedy: bool,
    seed: int = 0,
) -> float:
    """Return the share of `problems` whose one sampled answer ends in the right integer.

    Samples at temperature 1, or takes the likeliest token (`greedy`). There is no cache: the texts
    are a dozen tokens long.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.tensor(encode_prompts(tokenizer, problems))  # [b, s]
    num_prompt_tokens = token_ids.shape[1]
    with torch.no_grad():
        for _ in range(NUM_ANSWER_TOKENS + 4):
            logits = model(input_ids=token_ids, logits_to_keep=1, use_cache=False).logits[:, -1]
            probabilities = logits.float().softmax(-1)
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            likeliest = probabilities.argmax(-1, keepdim=True)
            token_ids = torch.cat([token_ids, likeliest if greedy else drawn], dim=1)
    num_right = 0
    for problem, row in zip(problems, token_ids[:, num_prompt_tokens:].tolist(), strict=True):
        end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row)
        integers = re.findall(r"\d+", str(tokenizer.decode(row[:end])))
        num_right += bool(integers) and integers[-1] == problem.answer
    return num_right / len(problems)


def report_accuracy(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Print the accuracy on held-out prompts after the warm-up, on half of them."""
    heldout = split_problems(seed)[1][: NUM_HELDOUT // 2]
    sampled = sample_accuracy(model, tokenizer, heldout, greedy=False)
    greedy = sample_accuracy(model, tokenizer, heldout, greedy=True)
    print(f"held-out accuracy after warm-up: {sampled:.3f} sampled, {greedy:.3f} greedy")
