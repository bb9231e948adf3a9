"""What a training step takes on a cluster described by a profile. Modelled, never measured; needs no torch."""
