"""Consistency check of the ranks, heartbeat, and flight recorder of recent operations."""
