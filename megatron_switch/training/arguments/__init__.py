"""From argv to the arguments of a run: parser, ranges, defaults, values from a checkpoint."""
