"""Autotuning of linear layers by measurement, and the cost model that `simulate` shares. See `docs/choice.md`."""
