"""Proof that the engine holds the right weights: attestation and canaries."""
