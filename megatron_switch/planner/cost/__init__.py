"""What a layout costs, in closed form: memory of a rank, and time of a step.

    memory           the sum of memory: state, activations, buffers; the peak
        state        weights, gradients, optimizer state
        activations  what layers keep for backward, and what one needs while it works
    timing           the sum of time: arithmetic, communication, bubble, optimizer
        traffic      bytes and seconds of every kind of communication
        expert_weights  what experts with few rows wait for their weights
    drop_rate        tokens that a balanced router drops
    lower_bound      a cheap bound of time and memory, by which the search leaves layouts out

How to add a term:

* of memory that a layer keeps: in ``activations.LayerBytes``, counted for one layer and one
  micro-batch; ``activations.kept_by_layers`` multiplies and adds it up.
* of memory that belongs to parameters: in ``state.state_bytes``.
* a new *part* of memory: a field of ``memory.MemoryByPart``, set in ``memory.predict`` and added in
  ``MemoryByPart.total`` and ``MemoryByPart.parts``. What lists the parts shows it from there.
* of communication: a method of ``traffic.Traffic`` that returns a ``Transfer``, listed in
  ``Traffic.per_micro_batch`` (it counts into the bubble) or ``Traffic.per_step``;
  ``timing.predict_step`` adds it up, and reports name it by ``Transfer.name``.
* of arithmetic: in ``timing.micro_batch_flops``; of the step's end: in ``timing.predict_step``.

``lower_bound.LowerBound`` must stay below all of them, or the search misses layouts
(``tests/planner/test_search.py`` compares). A term that adds cost may be left out of it; one that
takes cost away must be in it. Predictions of memory are held to real steps by
``tests/rehearsal/test_planner_memory.py``.
"""
