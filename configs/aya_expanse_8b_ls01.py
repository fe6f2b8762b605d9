"""Aya Expanse 8B on the Tulu 3 mixture with label smoothing 0.1, all weights, in its own template.

It has been tuned on instructions before: no base model is published. The weights and the optimizer
state are bfloat16 with stochastic rounding, and the activations are computed again in the backward
pass. The report has 200 questions in each language of Global-MMLU.
"""

out_dir = 'out/aya_expanse_8b_ls01'
model = 'CohereLabs/aya-expanse-8b'
data = 'allenai/tulu-3-sft-mixture'
template = 'model'
smoothing = 0.1
master_weights = 'stochastic'
checkpoint_activations = True
lr = 5e-6
val_size = 256

eval = {'tasks': ('global_mmlu',), 'limit': 200}
