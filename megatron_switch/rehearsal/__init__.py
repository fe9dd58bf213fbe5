"""One rank of any world size, rehearsed in one process without a GPU: real code, fake tensors."""
