"""Isolation: run an untrusted program, confined and supervised; see `client.Supervisor`."""
