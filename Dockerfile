# The CUDA stack: torch, vLLM, Megatron-core and Transformer Engine in the versions of
# scripts/requirements-cuda.txt and requirements-te.txt, and mcore_rl.
#
# NOT BUILT with Docker, which was not available. scripts/test_dockerfile.py carries out its
# instructions on a Debian without Docker, and checks the result.
#
#     docker build -t mcore_rl .
#     docker run --gpus all --ipc=host --ulimit memlock=-1 -v /data:/data mcore_rl \
#         bash scripts/run_deepseek_moe.sh --rl-hf-checkpoint /data/model --rl-prompts /data/p.jsonl
#
# CUDA's libraries and nvcc come with the packages; of the machine only the driver is needed.
FROM ubuntu:24.04

# A compiler and Python's headers: Triton and FlashInfer compile kernels while a run starts.
# bubblewrap confines code of python_sandbox where the container may make user namespaces.
# Ubuntu's archive keeps only the newest version of a package, so none can be pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        bubblewrap build-essential ca-certificates git procps \
        python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/mcore_rl

COPY setup.py pyproject.toml README.md LICENSE ./
COPY scripts/setup_env.sh scripts/requirements-cuda.txt scripts/requirements-te.txt scripts/
COPY scripts/setup_env scripts/setup_env
COPY mcore_rl mcore_rl
COPY patches patches

# Without a GPU, as here, the stack goes to .venv-cuda. Compiling Transformer Engine takes about 25
# minutes of one core; MAX_JOBS bounds how many files are compiled at a time.
ARG MAX_JOBS=4
RUN MCORE_RL_STACK=cuda MAX_JOBS=$MAX_JOBS bash scripts/setup_env.sh \
    && rm -rf .cache /root/.cache/pip /root/.cache/uv

COPY scripts scripts
COPY examples examples
# For scripts/gpu_trial.sh
COPY benchmarks benchmarks
COPY tests tests

# The CUDA toolkit of the packages. Without CUDA_HOME, vLLM disables FlashInfer's kernels.
ENV CUDA_HOME=/opt/mcore_rl/.venv-cuda/lib/python3.12/site-packages/nvidia/cu13
# Scripts take the python in PATH, and set nothing up.
ENV PATH=/opt/mcore_rl/.venv-cuda/bin:$CUDA_HOME/bin:$PATH \
    MCORE_RL_SKIP_SETUP=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# setup_env.sh goes on without Transformer Engine if its compilation fails. An image must not.
RUN python -m pip show --quiet transformer-engine-torch

# Fails if the packages no longer have the toolkit there.
RUN nvcc --version \
    && python -c 'from vllm.utils.flashinfer import has_flashinfer; assert has_flashinfer()'

CMD ["mcore-rl", "doctor"]
