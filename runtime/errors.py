"""The errors that end a program with one line for the person at the keyboard."""

import signal


class ConfigError(ValueError):
    """A key, a value or a config file that cannot be used; the message says what would be right."""


class CheckpointError(ValueError):
    """A model folder, config or weight file cannot be used; the message names it."""


class DataError(ValueError):
    """A data file, row or tokenizer that cannot be used; the message names file and line."""


class TrainingError(RuntimeError):
    """The run cannot continue; the message says at which step it stopped, and why."""


class Stopped(Exception):
    """The run was asked to stop and has saved its state; `signal` is the signal's number."""

    def __init__(self, number, when):
        super().__init__(f'stopped by {signal.Signals(number).name} {when}')
        self.signal = number
