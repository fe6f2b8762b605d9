"""The errors that end a program with one line."""

import signal


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
