"""Text to token files: what ``megatron-switch prepare`` does."""
