"""Numbers with their units, as messages and tables show them.

Files and memory of a host are binary (GiB). Memory of GPUs in the planner, and sizes of corpora,
are decimal (GB), as their vendors count. Counts of parameters have three digits.
"""

_BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20))
_DECIMAL = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6))
_COUNTS = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3))


def size_text(num_bytes: float) -> str:
    """Return a number of bytes in the binary unit that suits it: ``1.50 GiB``."""
    for unit, size in _BINARY:
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def decimal_size_text(num_bytes: float) -> str:
    """Return a number of bytes in the decimal unit that suits it: ``1.50 GB``."""
    for unit, size in _DECIMAL:
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes / 10**3:.1f} kB"


def gigabytes(num_bytes: float, digits: int = 1) -> str:
    """Return a number of bytes in GB, without the unit, for columns that are headed by it."""
    return f"{num_bytes / 10**9:,.{digits}f}"


def count_text(count: int) -> str:
    """Return a number of parameters or tokens, three digits and a unit: ``1.57T``."""
    for unit, size in _COUNTS:
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
