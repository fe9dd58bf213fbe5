"""Tokenising shards in several processes.

Processes are forked, so that they share what the parent has imported and built, tokenizer included.
They end with their parent, whatever ends it, and leave Ctrl-C to it. The result does not depend on
which process makes which shard.
"""

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from megatron_switch.data.preparation.token_shards import Shard, ShardRecord, ShardWriter
from megatron_switch.errors import DataError

_writer: ShardWriter | None = None  # of this worker process; None in the parent


def write_shards(
    writer: ShardWriter,
    shards: Sequence[Shard],
    *,
    workers: int,
    on_finished: Callable[[ShardRecord], None],
) -> None:
    """Tokenise shards, and report each one when it is finished.

    Args:
        writer: What makes a shard.
        shards: Those that are still to be made.
        workers: Number of processes; with 1 this process does the work itself.
        on_finished: Called in this process, in the order in which shards are finished.

    Raises:
        DataError: The input is bad, or a worker was killed. Finished shards stay.
        OSError: The folder cannot be written.
    """
    processes = min(workers, len(shards))
    if processes <= 1:
        for shard in shards:
            on_finished(writer.write(shard))
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, context, _start_worker, (writer,))
    try:
        for future in as_completed(_submit(pool, shards)):
            on_finished(future.result())
    except BrokenProcessPool as error:
        raise DataError(
            f"One of {processes} worker processes was killed, most likely because memory ran out. "
            "Finished work is kept: run the same command again with fewer --workers."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, shards: Sequence[Shard]) -> list[Future[ShardRecord]]:
    with warnings.catch_warnings():
        # Python warns of forks beside threads. numpy's and torch's are idle, and ready for a fork.
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        return [pool.submit(_write, shard) for shard in shards]


def _start_worker(writer: ShardWriter) -> None:
    global _writer
    _writer = writer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Hugging Face's tokenizers warn of their threads after a fork, and have nothing to gain here.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is a child"
    parent.join()
    os._exit(1)


def _write(shard: Shard) -> ShardRecord:
    assert _writer is not None, "the pool starts every worker with its writer"
    return _writer.write(shard)
