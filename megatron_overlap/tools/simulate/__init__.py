"""Model of the time of a training step on a cluster that a profile describes. Needs no torch and no GPU."""
