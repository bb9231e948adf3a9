"""The documentation, held to be true."""
