"""Llama 3.1 8B, all weights, on an 80 GB card (peak 63 GiB).

The weights and the optimizer state are bfloat16 with stochastic rounding, and the activations are
computed again in the backward pass.
"""

out_dir = 'out/llama3_8b_80gb_ls01'
model = 'meta-llama/Llama-3.1-8B'
data = 'allenai/tulu-3-sft-mixture'
smoothing = 0.1
master_weights = 'stochastic'
checkpoint_activations = True
lr = 5e-6
val_size = 256

eval = {'tasks': ('mmlu', 'arc_easy', 'hellaswag')}
