"""Machines that join and leave a run while it trains: one coordinator, and `join` on each machine."""
