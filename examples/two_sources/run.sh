#!/usr/bin/env bash
# GRPO on questions and on programming tasks together, on the GPUs of one machine:
#
#     bash examples/two_sources/run.sh QWEN3_FOLDER DATA [any Megatron or --rl-* flag]
#
# DATA has sources.yaml and heldout.yaml like those here, and the files that they name. Prompts whose
# responses are all right or all wrong are drawn less often.
# NPROC: processes, one per GPU (default 8).
set -euo pipefail

(($# >= 2)) || { echo "usage: run.sh QWEN3_FOLDER DATA [flags]" >&2 && exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
[[ -x $python ]] || python=python

exec "$python" -m mcore_rl.launch --nproc-per-node "${NPROC:-8}" -m mcore_rl.train \
  --rl-config "$here/../gsm8k_qwen3/config.yaml" --rl-reward gsm8k --rl-reward-weights 1 \
  --rl-hf-checkpoint "$1" --rl-prompts "$2/sources.yaml" --rl-eval-prompts "$2/heldout.yaml" \
  --rl-eval-samples 4 --rl-eval-temperature 0.6 --rl-curriculum less "${@:3}"
