"""Events of messages and waits of each rank, and the exposed time that they add up to."""
