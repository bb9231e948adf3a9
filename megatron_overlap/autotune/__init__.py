"""Autotuning of linear layers by measurement, and the cost model that it shares with the simulator."""
