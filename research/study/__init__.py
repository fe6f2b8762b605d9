"""Our own study: the plan, a script per claim, the tables and figures, and the page STUDY.md.

Scripts here import the rest of the program; nothing outside this folder imports them.
"""
