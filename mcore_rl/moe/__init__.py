"""Mixture of experts: choices in rollout, their replay in training, and expert load."""
