"""A run: how it starts, what it is built of, its learner, and what it records and saves.

`mcore_rl.run(job, model_provider)` is what a fork calls. Importing this package puts it in the
place of that function, so it can be called like it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _Run(ModuleType):
    def __call__(self, job: Any, model_provider: Callable[..., Any] | None = None) -> None:
        import mcore_rl

        mcore_rl._run(job, model_provider)


sys.modules[__name__].__class__ = _Run
