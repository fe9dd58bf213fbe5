"""Launch scripts for a cluster: a job as values, and the templates that render it.

Nothing here starts or measures anything. A rendered script is self-contained: the nodes need bash
and the installed package only. Start reading at :mod:`megatron_switch.launch.job`.
"""
