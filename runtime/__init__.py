"""What makes a run survive: settings, errors, checkpoints, devices, processes, resuming, the log.

Nothing here knows what a question or a conversation is (data/), or what becomes of samples
(results/).
"""

__version__ = '0.2.0'
