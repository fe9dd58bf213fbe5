"""Dry run of one rank of any world size in one process without a GPU: real code, fake tensors."""
