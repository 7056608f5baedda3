#!/usr/bin/env bash
# Installs Transformer Engine into an environment of the CUDA stack, completely or not at all:
#
#     bash transformer_engine.sh PYTHON REQUIREMENTS CONSTRAINTS WHEELS INSTALL...
#
# INSTALL... is the command that installs requirements into the environment of PYTHON. The extension
# is compiled against the installed torch: 33 files, some 25 minutes on one core, MAX_JOBS files in
# parallel. The wheel is kept in WHEELS for the next environment with this torch and Python, which
# pip's own cache would not distinguish from others.
set -euo pipefail

python=$1 requirements=$2 constraints=$3 install=("${@:5}")
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
wheels=$4/$("$python" -c '
import sys, torch; print(f"torch{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}")')
version=$(sed -n 's/^transformer-engine-torch==//p' "$requirements")
pip=("$python" -m pip --no-input --disable-pip-version-check)

# Uses the headers and libraries of torch's CUDA packages, not of an installed CUDA.
compile() {
  local cuda=$site/nvidia/cu13
  mkdir -p "$wheels"
  # Otherwise its version would contain the commit of this checkout, which pip refuses.
  NVTE_NO_LOCAL_VERSION=1 NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
    NVTE_WITH_NCCL_EP=0 CUDA_HOME=$cuda LIBRARY_PATH=$cuda/lib "${pip[@]}" --retries 3 wheel \
    --progress-bar off --no-deps --no-cache-dir --no-build-isolation --wheel-dir "$wheels" \
    "transformer-engine-torch==$version"
}

grep -vE '^(#|$|transformer-engine-torch==)' "$requirements" >"$TMPDIR/te.txt"
if "${install[@]}" -c "$constraints" -r "$TMPDIR/te.txt" &&
  { compgen -G "$wheels/transformer_engine_torch-$version-*.whl" >/dev/null || compile; } &&
  "${install[@]}" --no-deps "$wheels"/transformer_engine_torch-"$version"-*.whl; then
  exit 0
fi
# A partial package would be found but not imported, and Megatron accepts even an empty folder.
"${pip[@]}" uninstall --yes --quiet transformer-engine transformer-engine-cu13 \
  transformer-engine-torch || true
rm -rf "$site/transformer_engine"
exit 1
