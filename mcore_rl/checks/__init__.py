"""What a user can get wrong, found on the host before it starts: see `preflight`."""
