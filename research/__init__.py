"""What is built with the program: the papers as scripts, our own study, benchmarks beside peers.

Scripts here import the rest of the program; nothing outside this folder imports them.
"""
