"""Smoothed losses without stored logits, and the calibration metrics of the field."""

__version__ = '0.3.0'       # pyproject.toml installs this file as nanocal/__init__.py
