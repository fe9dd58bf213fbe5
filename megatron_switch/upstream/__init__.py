"""The border to Megatron-Core: supported version, patches, process groups under our names."""
