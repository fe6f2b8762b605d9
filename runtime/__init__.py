"""Infrastructure of a run: settings, errors, checkpoints, devices, processes, resuming, the log.

Nothing here depends on questions or conversations (data/), or on tables and plots (results/).
"""
