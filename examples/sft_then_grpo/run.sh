#!/usr/bin/env bash
# Supervised training on demonstrations, then GRPO from its checkpoint:
#
#     bash examples/sft_then_grpo/run.sh CHECKPOINT DEMONSTRATIONS PROMPTS [flags of both runs]
#
# DEMONSTRATIONS has rows with a prompt and a response, or with conversations as prompts; PROMPTS
# has prompts and answers. RUNS: folder of both runs (default runs/sft_then_grpo). NPROC: processes,
# one per GPU (default 8).
set -euo pipefail

(($# >= 3)) || { echo "usage: run.sh CHECKPOINT DEMONSTRATIONS PROMPTS [flags]" >&2 && exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
[[ -x $python ]] || python=python
runs=${RUNS:-runs/sft_then_grpo}

train() {
  "$python" -m mcore_rl.launch --nproc-per-node "${NPROC:-8}" -m mcore_rl.train "$@"
}

train --rl-config "$here/sft.yaml" --rl-hf-checkpoint "$1" --rl-prompts "$2" \
  --rl-run-dir "$runs/sft" "${@:4}"
# Steps continue counting: 200 steps of GRPO, with a new optimizer.
train --rl-config "$here/grpo.yaml" --rl-hf-checkpoint "$1" --rl-prompts "$3" \
  --rl-run-dir "$runs/grpo" --load "$runs/sft/checkpoints" "${@:4}"
