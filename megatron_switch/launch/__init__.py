"""Scripts that start a training on a cluster: a job as values, and templates that write it out.

Nothing here starts or measures anything. A rendered script is complete: it needs the package and
bash on the nodes, and no file of this package beside it.
"""
