"""Check of a data source before the launch: opens it as a rank does, as far as that is cheap."""

from concurrent.futures import Future
from threading import Thread

from titan_exp.config.data_files import unlimited_split
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.data_sets import asked, open_files
from titan_exp.config.schema.foreign_code import described
from titan_exp.data.sources.base import RandomAccessSource, build_source, held_out_fraction
from titan_exp.data.tokenizers import ByteTokenizer, encode_document
from titan_exp.data.validation_split import training_subset, validation_subset

CHECK_SECONDS = 10.0
"""Seconds after which opening a source is left to the ranks."""
SMALL_BYTES = 2**24
"""Largest size at which files are opened as documents; larger corpora are only listed."""


def check_source(config: DataConfig, *, evaluates: bool) -> None:
    """Open a source, divide it if the run evaluates on held-out documents, and read its first document.

    Raises:
        UserError: it cannot be opened (in the source's own words) or cannot be divided.
        Exception: your own source raised it.
    """
    if described(config.source).holds != "text" or "document" in described(config.source).reads:
        return  # the rules have checked these
    opened: Future[None] = Future()

    def run() -> None:
        try:
            opened.set_result(_open(config, evaluates))
        except BaseException as error:
            opened.set_exception(error)

    Thread(target=run, name="titan_exp-source-check", daemon=True).start()
    try:
        opened.result(CHECK_SECONDS)
    except TimeoutError:
        if opened.done():  # raised by the source
            raise


def _open(config: DataConfig, evaluates: bool) -> None:
    try:
        files = open_files(config)
    except OSError as error:
        reason = f"titan_exp cannot read {error.filename} ({(error.strerror or str(error)).lower()})"
        violation = Violation("data.source", config.source, reason, "give files that you can read")
        raise UserError("Cannot use this data source.", [violation]) from error
    small = files is not None and described(config.source).files and files.content.size <= SMALL_BYTES
    if asked(config.source, "open_files") is not None and not small:
        return
    source, fraction = build_source(config), held_out_fraction(config)
    if isinstance(source, RandomAccessSource):
        training_subset(source, fraction)
        if evaluates and fraction:
            validation_subset(source, fraction)
        document = source[0]
    else:
        if evaluates and fraction and config.validation_documents is None:
            raise UserError("The validation split of a stream has no limit.", [unlimited_split(config)])
        document = next(iter(source.open(0, None)), "")
    encode_document(document, ByteTokenizer())
