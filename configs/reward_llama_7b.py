"""The reward model of 'On the Calibration of Large Language Models and Alignment' (table 3).

data is comparison_data_v2.json of github.com/Instruction-Tuning-with-GPT-4/GPT-4-LLM. The paper
does not say how it makes pairs of the three scored answers; here all pairs of unequal scores count,
with one weight per prompt.
"""

out_dir = 'out/reward_llama_7b'
model = 'huggyllama/llama-7b'
data = 'comparison_data_v2.json'
template = 'alpaca'

method = 'reward'

lora = True
lora_rank = 8
lora_alpha = 32.0
lora_dropout = 0.1
lora_targets = ('q_proj', 'v_proj')

batch_size = 32
epochs = 2.0
lr = 2e-5
schedule = 'cosine'
warmup = 0.0
max_length = 2048
pack_len = 4096
val_size = 500
