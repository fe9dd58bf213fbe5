"""The Switch layer: pure functions of routing, and the Megatron modules that use them."""
