"""What an operation costs, by a model of the machine: the seed of a choice, and what `simulate` is made of."""
