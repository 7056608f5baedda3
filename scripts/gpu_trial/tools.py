"""Small checks for the stages' commands; each prints what it found and exits with 1 if it is wrong.

python scripts/gpu_trial/tools.py sized dense|moe FOLDER      make a checkpoint
python scripts/gpu_trial/tools.py libraries                   import vLLM's compiled modules
python scripts/gpu_trial/tools.py ending CHECKPOINT FOLDER    a copy whose responses end by EOS
python scripts/gpu_trial/tools.py ended RUN_DIR               whether all responses of a step did so
python scripts/gpu_trial/tools.py verified NAME FILE          the result of mcore_rl.verify
python scripts/gpu_trial/tools.py rows PROMPTS FILE           rows for supervised training and DPO
python scripts/gpu_trial/tools.py servers RUN_DIR             servers in use, of which one is lost
python scripts/gpu_trial/tools.py names CHECKPOINT EXPORTED   tensor names of two checkpoints
python scripts/gpu_trial/tools.py metrics RUN_DIR RUN_DIR [PREFIX ...]      steps of two runs, bit
                          for bit; but metrics whose names begin with one of these
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

LARGEST_MEAN_DIFFERENCE = 0.1  # of log-probs
EOS_SCALE = 8.0
NEEDED_LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "cumem_allocator")
# Sizes that replace those of benchmarks/cases.py: on a GPU 1.7 GB dense and 1.5 GB with experts, so
# that a copy takes milliseconds; on a CPU small, so that a step takes a second.
_ON_CPU: dict[str, Any] = dict(num_hidden_layers=2, vocab_size=1024)
ON_GPU: dict[str, dict[str, Any]] = {
    "dense": dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    ),
    "moe": dict(
        hidden_size=2048, intermediate_size=4096, moe_intermediate_size=1024,
        num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16, n_routed_experts=32,
    ),
}  # fmt: skip
# Measured by a clock or the kernel, so not a function of the seed.
_MEASURED = ("time/", "throughput/", "memory/", "health/", "reshard/peak_extra_bytes_max")
_MEASURED_ENDINGS = ("_seconds", "_peak_bytes")


def sized(kind: str, folder: str) -> str | None:
    from benchmarks.cases import DENSE, MOE
    from scripts.make_tiny_deepseek import make_checkpoint

    model = DENSE if kind == "dense" else MOE
    sizes = ON_GPU[kind] if os.environ["HAS_CUDA"] == "1" else _ON_CPU
    overrides = {**model.overrides, **sizes}
    make_checkpoint(folder, arch=model.arch, size=model.size, overrides=overrides)
    return None


def libraries() -> str | None:
    """Fail only for those that every run needs: others are for some cards or models."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    files = [file.relative_to(root.parent) for file in sorted(root.rglob("*.so"))]
    modules = [".".join(file.parts).partition(".abi3")[0] for file in files]
    importlib.import_module("torch")  # once: every child has it
    failed = [module for module in modules if not _loads(module)]
    needed = [name for name in NEEDED_LIBRARIES if f"vllm.{name}" in failed]
    return f"vLLM cannot run without {', '.join(needed)}" if needed else None


def _loads(module: str) -> bool:
    """Import a module in a child, which a module for another torch may crash; print the outcome."""
    sys.stdout.flush()
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            print(f"{module} does not load: signal {os.WTERMSIG(status)}")
        return status == 0
    try:
        importlib.import_module(module)
        print(f"{module} loads", flush=True)
        os._exit(0)
    except BaseException as error:
        print(f"{module} does not load: {error}", flush=True)
        os._exit(1)


def ending(checkpoint: str, folder: str) -> str | None:
    """Make two tokens end a response, with large logits of opposite signs: one is always likely."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    weights = load_file(Path(folder, "model.safetensors"))
    config = json.loads(Path(folder, "config.json").read_text())
    head, end = weights["lm_head.weight"], config["eos_token_id"]
    head[end] *= EOS_SCALE
    head[end + 1] = -head[end]
    for name in ("config.json", "generation_config.json"):
        Path(folder, name).write_text(json.dumps({**config, "eos_token_id": [end, end + 1]}))
        config = {}
    save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    return None


def ended(run: str) -> str | None:
    """All of a rollout with another behind it: the last one, too, which leaves a scheduled step."""
    from mcore_rl.observe.run_directory import read_metrics

    metrics = read_metrics(Path(run) / "metrics.jsonl")
    cut = [metrics[step]["response_tokens/cut_share"] for step in sorted(metrics) if step >= 0]
    print(
        f"ended by EOS: {', '.join(f'{1 - share:.0%}' for share in cut)} of the responses, by step"
    )
    return None if 0 in cut[:-1] else f"in each step of {run} some response ended by its length"


def verified(name: str, file: str) -> str | None:
    result = json.loads(Path(file).read_text())
    print(
        f"verified {name}: stored by vLLM equal: {result['stored_equal']}; log-probs differ by "
        f"{result['mean_abs_difference']:.4f} in the mean, {result['max_abs_difference']:.4f} at "
        f"most; received by a rank: {result['received_bytes_max']:,} bytes"
    )
    if result["mean_abs_difference"] > LARGEST_MEAN_DIFFERENCE:
        return f"{name}: log-probs differ by more than {LARGEST_MEAN_DIFFERENCE} in the mean"
    return None if result["stored_equal"] else f"{name}: differs in {result['differing'][:3]}"


def rows(prompts: str, file: str) -> str | None:
    """Give each prompt its answer and a wrong one."""
    read_rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    pairs = [
        {"prompt": row["prompt"], "response": row["answer"], "chosen": row["answer"]}
        | {"rejected": read_rows[at - 1]["answer"]}
        for at, row in enumerate(read_rows)
        if row["answer"] != read_rows[at - 1]["answer"]
    ]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return None


def servers(run: str) -> str | None:
    from mcore_rl.observe.run_directory import read_metrics

    metrics = read_metrics(Path(run) / "metrics.jsonl")
    admitted = [int(metrics[step]["servers/admitted"]) for step in sorted(metrics) if step >= 0]
    print(f"servers admitted, by step: {admitted}")
    return None if admitted[0] == 2 and admitted[-1] == 1 else "of two servers one must be lost"


def names(checkpoint: str, exported: str) -> str | None:
    expected, exported_names = tensor_names(Path(checkpoint)), tensor_names(Path(exported))
    print(f"{len(exported_names)} tensors exported")
    other = sorted(expected ^ exported_names)
    return f"the export and the checkpoint differ in names: {other[:5]}" if other else None


def tensor_names(folder: Path) -> set[str]:
    """Return the tensor names in the headers of all safetensors files of a checkpoint."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as content:
            names |= json.loads(content.read(int.from_bytes(content.read(8), "little"))).keys()
    return names - {"__metadata__"}


def metrics(one: str, other: str, *but: str) -> str | None:
    from mcore_rl.observe.run_directory import read_metrics

    runs = [read_metrics(Path(folder) / "metrics.jsonl") for folder in (one, other)]
    both = sorted(runs[0].keys() | runs[1].keys())
    steps = [[_of_seed(run.get(step, {}), but) for run in runs] for step in both]
    differing = {n for a, b in steps for n in a.keys() | b.keys() if a.get(n) != b.get(n)}
    if differing:
        return f"metrics of the two runs differ: {', '.join(sorted(differing)[:8])}"
    print(f"{sum(len(a) for a, _ in steps)} metrics equal, bit for bit")
    return None


def _of_seed(step: dict[str, float], but: tuple[str, ...]) -> dict[str, float]:
    return {
        name: value
        for name, value in step.items()
        if not name.startswith((*_MEASURED, *but)) and not name.endswith(_MEASURED_ENDINGS)
    }


Tool = Callable[..., str | None]
TOOLS: tuple[Tool, ...] = (
    *(sized, libraries, ending, ended, verified, rows, servers, names, metrics),
)

if __name__ == "__main__":
    tool, *arguments = sys.argv[1:]
    fault = {function.__name__: function for function in TOOLS}[tool](*arguments)
    if fault:
        print(f"gpu_trial: error: {fault}")
    sys.exit(fault is not None)
