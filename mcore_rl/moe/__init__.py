"""What concerns experts alone; routing replay and load statistics come here."""
