"""Commands that work on files: their flags, their output, and nothing of the work itself."""
