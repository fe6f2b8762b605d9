"""What only align.py uses: packed answers, prompts, rewards, rollouts, advantages, objectives.

align.py names these functions in its stages; train.py calls them.
"""
