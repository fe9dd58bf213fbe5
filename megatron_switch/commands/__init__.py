"""The commands of ``megatron-switch``: one module each with its flags and its work (``table``)."""
