"""Rollout: send prompts to the engines, and collect responses and rewards."""
