#!/usr/bin/env bash
# Installs Transformer Engine into an environment of the CUDA stack, or leaves none of it there:
#
#     bash transformer_engine.sh PYTHON REQUIREMENTS CONSTRAINTS WHEELS INSTALL...
#
# INSTALL... is the command that installs requirements into the environment of PYTHON. The extension
# is compiled against the torch that is installed: 33 files, some 25 minutes of one core and MAX_JOBS
# of them at a time. The wheel is kept in WHEELS for the next environment with this torch and Python,
# which pip's own cache would not tell from another.
set -euo pipefail

python=$1 requirements=$2 constraints=$3 install=("${@:5}")
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
wheels=$4/$("$python" -c '
import sys, torch; print(f"torch{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}")')
version=$(sed -n 's/^transformer-engine-torch==//p' "$requirements")
pip=("$python" -m pip --no-input --disable-pip-version-check)

# With the headers and libraries of the CUDA that torch brings, not of one that may be installed.
compile() {
  local cuda=$site/nvidia/cu13 links=$TMPDIR/lib library
  mkdir -p "$links" "$wheels"
  # Packages have libcudart.so.13; a linker asks for libcudart.so.
  for library in "$cuda"/lib/lib*.so.*; do
    ln -sf "$library" "$links/$(basename "${library%%.so.*}").so"
  done
  # Its version would else have the commit of the checkout that this lies in, and pip refuses that.
  NVTE_NO_LOCAL_VERSION=1 NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
    NVTE_WITH_NCCL_EP=0 CUDA_HOME=$cuda LIBRARY_PATH=$links "${pip[@]}" --retries 3 wheel \
    --progress-bar off --no-deps --no-cache-dir --no-build-isolation --wheel-dir "$wheels" \
    "transformer-engine-torch==$version"
}

grep -vE '^(#|$|transformer-engine-torch==)' "$requirements" >"$TMPDIR/te.txt"
if "${install[@]}" -c "$constraints" -r "$TMPDIR/te.txt" &&
  { compgen -G "$wheels/transformer_engine_torch-$version-*.whl" >/dev/null || compile; } &&
  "${install[@]}" --no-deps "$wheels"/transformer_engine_torch-"$version"-*.whl; then
  exit 0
fi
# Half of it would be found and could not be imported; Megatron takes an empty folder for it.
"${pip[@]}" uninstall --yes --quiet transformer-engine transformer-engine-cu13 \
  transformer-engine-torch || true
rm -rf "$site/transformer_engine"
exit 1
