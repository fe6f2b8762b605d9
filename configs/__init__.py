"""One small file per experiment: the settings of a run of train.py or align.py, as assignments.

Nothing here is executed; runtime/config.py reads the files. Code belongs in train.py, loops over
several runs in research/papers/ or in a script of your own.
"""
