"""The commands around a run: plan, doctor, report."""

import argparse
from typing import NoReturn

from mcore_rl.common.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """Takes no abbreviated flags; its errors are UsageErrors of one sentence."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see {self.prog} --help")
