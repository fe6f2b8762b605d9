"""One small file per experiment: the settings of a run of train.py or align.py, as assignments.

Nothing here is executed; runtime/config.py reads the files. A key that a file leaves out has the
default in train.py. Loops over several runs belong in a script: see demo.py or research/papers/.
"""
