"""A reward for runs of a model that has learnt nothing: `--rl-reward scripts.varied_reward:score`.

Every answer of such a model is wrong; without rewards that differ there would be no gradient.
"""

import zlib


def score(*, prompt: str, response: str, answer: str) -> float:
    """One of eight values, by the response's checksum."""
    return zlib.crc32((prompt + response).encode()) % 8 / 7
