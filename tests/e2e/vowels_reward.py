"""A reward that a random model can learn in a few steps."""


def score(prompt: str, response: str, answer: str) -> float:
    """The share of vowels in the response."""
    return sum(letter in "aeiou" for letter in response) / max(1, len(response))
