"""The planner: in which layouts a model trains fastest on a cluster. Plain values, no torch.

planned_model    model and training, from ``--model`` and flags
hardware/        what a cluster is made of, and measurements of its links
request          what is planned: model, batch, cluster, and sizes that are decided already
legal_sizes      every choice of parallel sizes that the rules of ``layout/`` accept
search           the search: choices in the order of their lower bound, the best few kept
layout_plan      one choice: micro-batch, dispatch, virtual stages, memory saving
memory_saving    the ways to save memory, in the order of their cost in time
cost/            memory and time of one layout in closed form
bottleneck       what limits a plan, and why it is faster than another
plan_warnings    what is risky about it
explanation      every number of a plan with its formula
plan_flags       a plan as flags of ``megatron-switch train``
plan_file        plans as JSON, written and read
grid_product     the tutorials' data x model x expert product as a layout
"""
