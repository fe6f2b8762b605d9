"""Gemma 3 4B on the Tulu 3 mixture with label smoothing 0.1: the text model of its checkpoint.

The weights and the optimizer state are bfloat16 with stochastic rounding.
"""

out_dir = 'out/gemma3_4b_ls01'
model = 'google/gemma-3-4b-pt'
data = 'allenai/tulu-3-sft-mixture'
template = 'gemma'
smoothing = 0.1
master_weights = 'stochastic'
lr = 5e-6
val_size = 256

eval = {'tasks': ('mmlu', 'arc_easy', 'hellaswag')}
