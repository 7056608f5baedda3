"""Runs a program that nobody trusts, confined and supervised: see `client.Supervisor`."""
