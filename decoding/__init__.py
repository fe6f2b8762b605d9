"""What decoding needs, and the tasks whose answers are written.

How a token is drawn, the cache of keys and values, the slots of the sequences decoded at once, and
the loop, answers.py; the forward pass is model.py's. written_tasks.py lets evaluate.py use it.
"""
