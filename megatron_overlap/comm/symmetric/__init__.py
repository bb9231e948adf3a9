"""Symmetric memory: buffers that every rank of a group can address, with copies, flags and acknowledgements."""
