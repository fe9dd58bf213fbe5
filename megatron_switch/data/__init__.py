"""From text on disk to Megatron's indexed token files."""
