"""A reward function of a fork's own."""


def length(prompt: str, response: str, answer: str) -> float:
    """Longer is better."""
    return float(len(response))
