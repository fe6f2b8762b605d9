"""Tasks that ask more of a model than to score options: written answers and variants of questions.

Prompts, grading, programs and their sandbox, confidences in answers, judges, P(True) and P(IK),
orders of options. evaluate.py opens them by the table of names in runtime/rooms.py.
"""
