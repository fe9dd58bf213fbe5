"""Layouts: parallel sizes, the rules that make them legal, and the arithmetic of their ranks.

    sizes           parallel sizes as given, legal or not
    grid_rules      what makes them two grids of ranks
    model_rules     what makes them fit a model and a batch
    suggestions     the error for illegal sizes, with the nearest legal ones
    validation      the entry point: sizes and model in, layout or error out
    grid            a legal layout: coordinates and groups of every rank
    nodes           the nodes and leaf switches of a group
    rank_table      a layout as text
    workload        batch, precision and dispatch, as far as memory and time depend on them

Plain values: no torch, no process group; answered at once on a login node.
:mod:`megatron_switch.parallel_state` builds the process groups of a layout, and
:mod:`megatron_switch.planner` searches for the fastest one.
"""
