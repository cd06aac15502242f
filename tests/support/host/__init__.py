"""What this host can run, and what only a host shows."""
