"""What concerns experts alone: their choice in rollout, replayed in training, and their load."""
