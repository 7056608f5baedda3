"""Names for a user's environment with several turns.

    from mcore_rl.api.environment import Environment, EnvironmentPrompt, Response, StepResult

The same names are in `mcore_rl.api`; see `mcore_rl.environments.interface`.
"""

from mcore_rl.environments.interface import (
    Environment,
    EnvironmentPrompt,
    Response,
    StepResult,
)
from mcore_rl.environments.tools import ToolEnvironment

__all__ = ["Environment", "EnvironmentPrompt", "Response", "StepResult", "ToolEnvironment"]
