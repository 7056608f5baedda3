#!/usr/bin/env bash
# Builds the complete CUDA stack on a machine without a GPU and runs the contract tests on it:
#
#     bash scripts/test_cuda_stack.sh [further arguments of pytest]
#
# Run it when pins change: run_tests.sh --all runs the same tests on the packages only. It installs
# into .venv-cuda, compiles Transformer Engine's extension (MAX_JOBS files in parallel), and needs
# gcc, 16 GiB of disk, and a network the first time. It ends with its findings and the time of each
# stage, also in .cache/cuda_stack.txt; exit code 1 if a test failed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
summary=.cache/cuda_stack.txt
mkdir -p .cache
: >"$summary"

stage() { # name, command
  local started=$SECONDS status=0
  echo "== $1"
  "${@:2}" || status=$?
  echo "$1: $((SECONDS - started)) s, exit code $status" >>"$summary"
  return "$status"
}

if ! command -v gcc >/dev/null; then
  echo "gcc is needed and not in PATH: install it." >&2
  exit 1
fi
stage "the environment of the tests" bash scripts/setup_env.sh
stage "the CUDA stack" env MCORE_RL_STACK=cuda bash scripts/setup_env.sh
environment=.venv-cuda
[[ -d $environment ]] || environment=.venv # on a machine with a GPU
{
  du -sh "$environment" | sed 's/\t/ in /'
  "$environment/bin/python" -m pip list --format freeze 2>/dev/null |
    grep -iE '^(torch|vllm|megatron[-_]core|transformer[-_]engine.*)=='
} >>"$summary"

export PATH=$PWD/.venv/bin:$PATH MCORE_RL_CUDA_STACK=full
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1
export CUDA_DEVICE_MAX_CONNECTIONS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind

failed=0
stage "contract tests" python -m pytest tests/cuda --durations=15 "$@" || failed=1
echo "== in $summary"
cat "$summary"
exit "$failed"
