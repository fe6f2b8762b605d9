"""Tasks that ask more of a model than to score options: written answers and variants of questions.

evaluate.py opens them by the table of names in runtime/rooms.py.
"""
