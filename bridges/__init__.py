"""Other tools: what they wrote, and what they read.

Prediction files and the command `nanocal`, samples of lm-evaluation-harness and its metrics, the
hub and the model card, adapters of PEFT, tokenizer files, temperatures folded into weights.
"""
