"""What every room needs: errors, agreement between ranks, objects over gloo, the platform."""
