"""--rl-import examples/own_parts/reward.py --rl-reward gsm8k,brevity --rl-reward-weights 1,0.1"""

from mcore_rl.api import reward


@reward("brevity")
def brevity(*, prompt: str, response: str, answer: str) -> float:
    """Between 0 and 1: the shorter, the better."""
    return 1 / (1 + len(response) / 100)
