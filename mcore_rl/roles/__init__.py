"""Who does what on which ranks: actor and engines, critic, reward model."""
