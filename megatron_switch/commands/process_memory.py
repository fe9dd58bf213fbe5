"""How much memory a process and its children hold together.

Forked ranks share pages, so resident sizes would count them several times; the proportional size
(PSS) counts each page once.
"""

import psutil


class PeakMemory:
    """The most memory that a process tree held at any sample.

    Args:
        pid: Process at the root of the tree.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak_bytes = 0

    def sample(self) -> None:
        """Measure now; a process that ends meanwhile counts as gone."""
        total = 0
        try:
            root = psutil.Process(self._pid)
            for process in [root, *root.children(recursive=True)]:
                total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return
        self.peak_bytes = max(self.peak_bytes, total)
