"""What small updates of bfloat16 weights do to a model, with main parameters dithered or not.

    python benchmarks/small_updates.py --measure    # SmolLM2-135M-Instruct, ten minutes, then draws
    python benchmarks/small_updates.py              # draws again, from the record alone

AdamW trains the model in float32 on the answers to 16 questions. After each update the loss is
computed in float32 arithmetic with three roundings of the same updates: none, to bfloat16 from main
parameters that began as the weights, and to bfloat16 from dithered ones (`--rl-dither`).
Needs the folder that `scripts/make_smollm2.py` makes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import records  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.pages import fact_list, section, verdict_table, write_section  # noqa: E402
from benchmarks.step_time_task import WORKLOADS, checkpoint_of  # noqa: E402
from mcore_rl.megatron.dither import dither  # noqa: E402

RECORD = "small_updates"
RATES, NUM_UPDATES, NUM_ROWS = (2e-5, 1e-6), 8, 16
EXACT, ROUNDED, DITHERED = "exact", "rounded", "dithered"

Tensors = list[torch.Tensor]


def measure(folder: Path) -> list[dict[str, Any]]:
    """Return, by rate and update, the loss of each rounding and the share of changed weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (folder / "prompts" / "train.jsonl").read_text().splitlines()[:NUM_ROWS]
    batch = [_tokens(tokenizer, json.loads(line)) for line in lines]
    parameters = list(model.parameters())
    weights = [parameter.detach().clone() for parameter in parameters]
    dithered = [weight.clone() for weight in weights]
    for copies in dithered:
        dither(copies, torch.bfloat16, 0)
    rows = []
    for rate in RATES:
        _set(parameters, weights)
        rows.append({"rate": rate, "update": 0, EXACT: _loss(model, batch)})
        optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        moved = [torch.zeros_like(weight) for weight in weights]
        for update in range(1, NUM_UPDATES + 1):
            _set(parameters, _sum(weights, moved))
            optimizer.zero_grad()
            _loss(model, batch, with_gradients=True)
            optimizer.step()
            moved = [p.detach() - w for p, w in zip(parameters, weights, strict=True)]
            row: dict[str, Any] = {"rate": rate, "update": update}
            for name, values in (
                (EXACT, _sum(weights, moved)),
                (ROUNDED, _rounded(_sum(weights, moved))),
                (DITHERED, _rounded(_sum(dithered, moved))),
            ):
                _set(parameters, values)
                row[name] = _loss(model, batch)
                row[f"{name} changed"] = _changed(values, weights)
            rows.append(row)
            print(row, flush=True)
    return rows


def _tokens(tokenizer: Any, row: dict[str, Any]) -> torch.Tensor:
    asked = [{"role": "user", "content": row["prompt"]}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    tokens: torch.Tensor = tokenizer(text + str(row["answer"]), return_tensors="pt").input_ids
    return tokens


def _loss(model: Any, batch: Sequence[torch.Tensor], *, with_gradients: bool = False) -> float:
    total = 0.0
    with torch.set_grad_enabled(with_gradients):
        for tokens in batch:
            loss = model(input_ids=tokens, labels=tokens).loss / len(batch)
            if with_gradients:
                loss.backward()
            total += float(loss.detach())
    return total


def _set(parameters: Tensors, values: Tensors) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)


def _sum(tensors: Tensors, others: Tensors) -> Tensors:
    return [one + other for one, other in zip(tensors, others, strict=True)]


def _rounded(tensors: Tensors) -> Tensors:
    return [tensor.bfloat16().float() for tensor in tensors]


def _changed(tensors: Tensors, weights: Tensors) -> float:
    pairs = list(zip(tensors, weights, strict=True))
    changed = sum(int((tensor != weight).sum()) for tensor, weight in pairs)
    return changed / sum(weight.numel() for weight in weights)


def page(record: dict[str, Any]) -> list[str]:
    """Return the section of benchmarks/RESULTS.md."""
    lines = [
        "# Small updates of bfloat16 weights",
        "",
        f"Drawn by `benchmarks/small_updates.py` from `benchmarks/records/{RECORD}.json`. The loss",
        f"of SmolLM2-135M-Instruct for the answers to {NUM_ROWS} questions after updates by AdamW,",
        "in float32 arithmetic: with the exact updates, rounded to bfloat16, and rounded from",
        "dithered main parameters. In brackets: the share of weights that have changed.",
        "",
        *fact_list(record["facts"]),
        "",
        "| rate | update | exact | rounded | dithered |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in record["rows"]:
        if row["update"]:
            cells = [f"{row[n]:.4f} ({row[f'{n} changed']:.1%})" for n in (ROUNDED, DITHERED)]
        else:
            cells = [f"{row[EXACT]:.4f} (0.0%)"] * 2
        found = f"{row['update']} | {row[EXACT]:.4f} | {' | '.join(cells)}"
        lines.append(f"| {row['rate']:g} | {found} |")
    return [*lines, "", *verdict_table(_verdicts(record["rows"]))]


def _verdicts(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """Return how much of the decrease of the loss arrives, after the first and the last update."""
    verdicts = []
    for rate in RATES:
        first, *others = (row for row in rows if row["rate"] == rate)
        arrived = {
            name: [(first[EXACT] - row[name]) / (first[EXACT] - row[EXACT]) for row in others]
            for name in (ROUNDED, DITHERED)
        }
        shown = {name: f"{each[0]:.0%} and {each[-1]:.0%}" for name, each in arrived.items()}
        verdicts.append(
            (
                f"rate {rate:g}: dithered, all of the decrease arrives, within 5 %",
                f"{shown[DITHERED]} of it after 1 and {NUM_UPDATES} updates; without dither "
                f"{shown[ROUNDED]}",
                all(abs(share - 1) < 0.05 for share in arrived[DITHERED]),
            )
        )
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure; default: only draw")
    options = parser.parse_args(arguments)
    if options.measure:
        workload = next(each for each in WORKLOADS if each.is_published)
        facts = facts_of_run("small_updates.py", arguments, ())
        records.write(RECORD, facts, rows=measure(checkpoint_of(workload)))
    found = page(records.read(RECORD))
    write_section(records.RESULTS, RECORD, section(RECORD, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
