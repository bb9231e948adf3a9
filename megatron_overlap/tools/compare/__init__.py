"""Step time, model FLOPs and MFU, and the comparison of one launch with another."""
