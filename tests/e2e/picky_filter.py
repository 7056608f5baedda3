"""Imported by `--rl-import`: group filters that drop and replace groups for any reason."""

from mcore_rl.api import Drop, group_filter


@group_filter("picky", reasons=["odd", "third"])
def picky(group, parameters):
    """Replace a third of all groups, by the sum of their tokens, and drop others by their row."""
    if sum(int(sample.rollout.response_token_ids.sum()) for sample in group) % 3 == 0:
        return Drop("odd", refill=True)
    return Drop("third") if group[0].rollout.prompt.index % 3 == 0 else None


@group_filter("later", reasons=["first"])
def later(group, parameters):
    """Drop what the weights of the first step have sampled."""
    return Drop("first") if group[0].rollout.weight_version == 1 else None
