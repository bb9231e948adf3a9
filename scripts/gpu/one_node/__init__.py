"""Parts and methods of node.py."""
