"""Parts of first_contact.py, each run in a process of its own."""
