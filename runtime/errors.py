"""The errors that end a program with one line, and how text of others is printed."""

import re
import signal


def escape_controls(text):
    """Return a text of others to print: control characters but line breaks and tabs are escaped."""
    return re.sub('[\x00-\x08\x0b-\x1f\x7f-\x9f]', lambda match: repr(match[0])[1:-1], text)


def shorten(text, limit):
    """Return a text without its middle if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    return f'{text[:limit * 2 // 3]} [...] {text[len(text) - limit // 3:]}'


def out_of_memory(error):
    """Return the error, or that in whose handling it was raised, if memory is lacking, or None."""
    while error and not (isinstance(error, MemoryError)
                         or type(error).__name__ == 'OutOfMemoryError'
                         or re.search("out of memory|allocate memory|ALLOC_FAILED", str(error))):
        error = error.__context__
    return error


class ConfigError(ValueError):
    """An unusable key, value or config file; the message says what would be right."""


class CheckpointError(ValueError):
    """An unusable model folder, config.json or weight file; the message names it."""


class DataError(ValueError):
    """An unusable data file, row or tokenizer; the message names file and line."""


class TrainingError(RuntimeError):
    """The run cannot continue; the message says at which step it stopped, and why."""


class ProcessError(RuntimeError):
    """Another process that this one needs has ended."""


class Stopped(Exception):
    """The run was asked to stop and has saved its state; `signal` is the signal's number."""

    def __init__(self, number, when):
        super().__init__(f'stopped by {signal.Signals(number).name} {when}')
        self.signal = number
