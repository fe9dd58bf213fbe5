"""Megatron's ``pretrain`` with our builders, batches and guards; the only importer of the loop."""
