"""A reward for runs of an untrained model: `--rl-reward scripts.varied_reward:score`.

Every answer of such a model is wrong; without rewards that differ there would be no gradient.
"""

import zlib


def score(*, prompt: str, response: str, answer: str) -> float:
    """Return one of eight values, by the checksum of prompt and response."""
    return zlib.crc32((prompt + response).encode()) % 8 / 7
