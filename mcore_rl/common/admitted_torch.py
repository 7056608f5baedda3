"""MCORE_RL_ADMIT_TORCH=2.11 admits another torch than the supported one, in trials and tests.

A machine to try something on for half an hour may have a torch that cannot be replaced. The
variable names its version, or how it begins. It is read wherever a version of torch is refused:
`flags.packages` and the registry of patches. Anywhere but in processes of scripts/gpu_trial.sh and
of pytest it is refused itself: a run whose kernels were compiled against another torch can fail
late, or compute something else.
"""

from __future__ import annotations

import os

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from mcore_rl.common.errors import UsageError

VARIABLE = "MCORE_RL_ADMIT_TORCH"
# Set in every process of a stage of the trial, and of a test.
_OF_TRIALS_AND_TESTS = ("MCORE_RL_GPU_TRIAL", "PYTEST_CURRENT_TEST")


def is_admitted(version: str) -> bool:
    """Return whether the variable names this version of torch.

    Raises UsageError if it is set outside of a trial and a test, or is not a version.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return False
    flag = f"{VARIABLE}={named}"
    if not any(os.environ.get(name) for name in _OF_TRIALS_AND_TESTS):
        raise UsageError(
            "is for scripts/gpu_trial.sh and tests alone",
            flag=flag,
            remedy="unset it and run scripts/setup_env.sh, which installs the supported torch",
        )
    try:
        admitted = SpecifierSet(f"=={named}.*")
    except InvalidSpecifier:
        raise UsageError("is not a version of torch", flag=flag, remedy="name 2.11, say") from None
    return admitted.contains(Version(version).public, prereleases=True)
