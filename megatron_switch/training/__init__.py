"""The shell around Megatron's training loop: the only importer of megatron.training."""
