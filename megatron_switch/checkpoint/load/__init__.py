"""Which checkpoint a run loads, and whether its settings agree with the command line."""
