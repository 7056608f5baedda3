"""A reward function whose process dies of one sample in four."""

import os


def score(prompt, response, answer):
    if sum(response.encode()) % 4 == 0:
        os._exit(7)
    return float(response.strip() == answer)
