"""Preparation of training data: text in, Megatron's ``.bin`` and ``.idx`` out.

Text of any origin becomes one file of tokens, one document a sequence, each with an end-of-document
token behind. The tokenizer is a SentencePiece model trained on the text, or any that Megatron
builds. The result depends on input and settings alone: not on ``--workers``, nor on how often the
work was interrupted. Division into training and validation is left to Megatron's ``--split``.

Modules: ``settings`` has the flags, ``corpus`` finds files, ``documents`` reads them, ``tokenizer``
builds Megatron's tokenizers, ``token_shards`` and ``workers`` tokenise, ``workspace`` keeps the
output folder, ``prepared`` describes the result.
"""

import errno
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.progress import Progress

from megatron_switch import __version__
from megatron_switch.data.indexed_files import check_indexed_dataset
from megatron_switch.data.preparation.corpus import Corpus, find_corpus, library_root
from megatron_switch.data.preparation.prepared import SCHEMA, Prepared, from_json
from megatron_switch.data.preparation.sentencepiece_model import train_sentencepiece
from megatron_switch.data.preparation.settings import Settings
from megatron_switch.data.preparation.token_shards import (
    Shard,
    ShardRecord,
    ShardWriter,
    plan_shards,
    sample_texts,
)
from megatron_switch.data.preparation.workers import write_shards
from megatron_switch.data.preparation.workspace import Workspace
from megatron_switch.data.tokenizer import Tokenizer, build_tokenizer
from megatron_switch.errors import DataError
from megatron_switch.utils.progress import bytes_bar

_TEXT_BYTES_PER_TOKEN = 3  # of English and code; an estimate for the disk space only


def prepare(args: Namespace) -> Prepared:
    """Prepare data.

    Args:
        args: The flags of the command.

    Raises:
        ConfigError: The flags cannot work together or in this installation.
        DataError: The input, the tokenizer or the disk cannot be used.
    """
    settings = Settings.from_arguments(args)
    corpus = find_corpus(
        args.inputs,
        library=library_root() if args.stdlib else None,
        library_tests=args.stdlib_tests,
        text_key=settings.options.text_key,
        skip_bad=settings.options.skip_bad,
        leave_out=args.output,
    )
    _warn_of_unused(args, corpus)
    workspace = Workspace(args.output, settings.fingerprint(corpus))
    job = _Job(settings, corpus, workspace)
    if not args.overwrite and (done := job.finished()):
        _say(f"--output {args.output} already holds this result.")
        return done
    workspace.check_output(overwrite=args.overwrite)
    try:
        with workspace.opened() as start:
            if start == "restarted":
                _say("Input or settings differ from those of the unfinished work: starting over.")
            return job.make()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"No space is left in --output {args.output}. Finished work is kept: free some "
                "space, then run the same command again."
            ) from error
        raise DataError(
            f"Preparing into --output {args.output} failed: {error}. Give a folder that can be "
            "written, or run the same command again to go on."
        ) from error


@dataclass(frozen=True)
class _Job:
    """One preparation: what is asked for, of which files, and where it goes."""

    settings: Settings
    corpus: Corpus
    workspace: Workspace

    def finished(self) -> Prepared | None:
        """Return what an earlier, equal command made, None when there is work to do.

        Raises:
            DataError: The report is there, but files that it names are missing or damaged.
        """
        report = self.workspace.finished_report()
        skip_bad = self.settings.options.skip_bad
        if report is None or (report.get("left_out_by_flag") and not skip_bad):
            return None
        prepared = replace(
            from_json(report),
            prefix=str(self.workspace.prefix),
            training_flags=self.settings.training_flags(self.workspace),
        )
        check_indexed_dataset(prepared.prefix, vocab_size=prepared.tokenizer["vocab_size"])
        return prepared

    def make(self) -> Prepared:
        """Do the work inside an opened workspace, and publish it."""
        shards = plan_shards(self.corpus.files)
        # No thread that refreshes: worker processes are forked meanwhile.
        with bytes_bar(auto_refresh=False) as bar:
            tokenizer = self._tokenizer(shards, bar)
            writer = ShardWriter(self.workspace.folder, tokenizer, self.settings.options)
            records = self._tokenise(writer, shards, bar)
            changed = [file.path for file in self.corpus.files if not file.is_unchanged()]
            if changed:
                raise DataError(
                    f"{changed[0]} changed while it was being read. Run the same command again "
                    "when nothing writes to the input."
                )
            prepared = self._join(writer, records)
        self.workspace.publish(asdict(prepared))
        return prepared

    def _tokenizer(self, shards: Sequence[Shard], bar: Progress) -> Tokenizer:
        """Build the tokenizer, after training it where that is asked for and not done yet."""
        model = self.workspace.folder / self.workspace.tokenizer_model.name
        trained = self.settings.trained
        if trained is not None and not model.exists():
            task = bar.add_task("training the tokenizer", total=None)
            bar.refresh()
            texts = sample_texts(shards, trained.sample_bytes, self.settings.options)
            temporary = model.with_suffix(".tmp")
            temporary.write_bytes(train_sentencepiece(texts, trained))
            temporary.replace(model)
            bar.remove_task(task)
        return build_tokenizer(self.settings.tokenizer_arguments(model))

    def _tokenise(
        self, writer: ShardWriter, shards: Sequence[Shard], bar: Progress
    ) -> list[ShardRecord]:
        """Return the records of all shards in order, after making those that are missing."""
        records = {r.index: r for shard in shards if (r := writer.finished(shard.index))}
        missing = [shard for shard in shards if shard.index not in records]
        if records:
            _say(f"Resuming: {len(records)} of {len(shards)} shards are finished.")
        weight = sum(shard.weight for shard in shards)
        left = sum(shard.weight for shard in missing)
        # Shards stay until they are joined, so at the end everything is on the disk twice.
        self.workspace.check_space((weight + left) / _TEXT_BYTES_PER_TOKEN * writer.itemsize)
        task = bar.add_task("tokenising", total=weight, completed=weight - left)

        def note(record: ShardRecord) -> None:
            records[record.index] = record
            bar.update(task, advance=shards[record.index].weight, refresh=True)

        write_shards(writer, missing, workers=self.settings.workers, on_finished=note)
        return [records[shard.index] for shard in shards]

    def _join(self, writer: ShardWriter, records: Sequence[ShardRecord]) -> Prepared:
        """Join the shards in the work folder, and describe the result."""
        documents = sum(record.documents for record in records)
        if documents == 0:
            raise DataError("No document of the input holds text. Give other files.")
        prefix = writer.join([record.index for record in records if record.documents])
        facts = check_indexed_dataset(prefix, vocab_size=writer.tokenizer.vocab_size)
        faults = self.corpus.faults
        trained = self.settings.trained
        return Prepared(
            schema=SCHEMA,
            version=__version__,
            prefix=str(self.workspace.prefix),
            files=len(self.corpus.files),
            empty_files=self.corpus.empty,
            documents=documents,
            empty_documents=sum(record.empty for record in records),
            tokens=facts.tokens,
            text_bytes=sum(record.text_bytes for record in records),
            left_out=len(faults) + sum(record.bad for record in records),
            left_out_by_flag=self.corpus.by_flag + sum(record.by_flag for record in records),
            reasons=(*faults, *(reason for record in records for reason in record.reasons)),
            tokenizer={
                "type": self.settings.tokenizer_type,
                "vocab_size": writer.tokenizer.vocab_size,
                "eod": writer.tokenizer.eod,
                "trained": asdict(trained) if trained else None,
            },
            data={
                "dtype": facts.dtype.name,
                "bin_bytes": prefix.with_suffix(".bin").stat().st_size,
                "idx_bytes": prefix.with_suffix(".idx").stat().st_size,
            },
            training_flags=self.settings.training_flags(self.workspace),
        )


def _warn_of_unused(args: Namespace, corpus: Corpus) -> None:
    formats = {file.format for file in corpus.files}
    if args.text_key is not None and formats == {"text"}:
        _say("--text-key changes nothing: there is no .jsonl and no .parquet among the input.")
    if args.document_separator is not None and "text" not in formats:
        _say("--document-separator changes nothing: there is no text file among the input.")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
