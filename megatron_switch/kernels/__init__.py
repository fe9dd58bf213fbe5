"""Triton kernels for what a Switch layer spends on memory traffic: one operation a file (L2).

They are functions of plain tensors that allocate on the device of their input, never read a value
back to the host and start no communication. Each equals a path of :mod:`megatron_switch.moe` in
plain torch, which is the definition; :mod:`megatron_switch.kernels.selection` says which of the two
runs.
"""
