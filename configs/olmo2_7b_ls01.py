"""OLMo 2 7B on the Tulu 3 mixture with label smoothing 0.1, all weights.

The base model; its template is that of OLMo's own tuned models. The weights and the optimizer state
are bfloat16 with stochastic rounding, and the activations are computed again in the backward pass.
"""

out_dir = 'out/olmo2_7b_ls01'
model = 'allenai/OLMo-2-1124-7B'
data = 'allenai/tulu-3-sft-mixture'
template = 'tulu'
smoothing = 0.1
master_weights = 'stochastic'
checkpoint_activations = True
lr = 5e-6
val_size = 256

eval = {'tasks': ('mmlu', 'arc_easy', 'hellaswag')}
