"""Symmetric memory: buffers that every rank of a group addresses, copies, flags and acknowledgements."""
