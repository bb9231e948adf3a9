"""What people run around a training: launch, compare, doctor, trace, plan and simulate."""
