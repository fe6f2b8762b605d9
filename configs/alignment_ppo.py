"""PPO of 'On the Calibration of Large Language Models and Alignment' (table 3), on one GPU.

Before it: python train.py configs/llama_7b_alpaca.py --smoothing=0
           python align.py configs/reward_llama_7b.py

The paper states batch 8 on 4 GPUs with 8 micro-batches, learning rate, LoRA, 128 tokens, 3 epochs
of Alpaca's prompts. Its values are those of TRL's StackLLaMA, so what it leaves open is taken from
there: 4 updates per batch, the adaptive KL, clipping and lambda, no gradient clipping, no schedule.
Three differences: LoRA's dropout is 0, not 0.05, since ratios would be random; the weights are
bfloat16, not 8 bits; an answer may end before 128 tokens, and there is no early stopping. TRL's
releases of that spring had faults in PPO, which are not repeated here.
"""

out_dir = 'out/alignment_ppo'
model = 'out/llama_7b_alpaca'
data = 'tatsu-lab/alpaca'
template = 'alpaca'

method = 'ppo'
reward = 'out/reward_llama_7b'
group_size = 1
max_tokens = 128
max_length = 640
pack_len = 2048
truncated = 'score'

updates = 4
kl = 'reward'
kl_coef = 0.2
kl_target = 6.0
kl_horizon = 10000
clip = 0.2
discount = 1.0
gae_lambda = 0.95
value_clip = 0.2
value_coef = 0.1

lora = True
lora_rank = 16
lora_alpha = 32.0
lora_targets = ('q_proj', 'v_proj')

batch_size = 32
epochs = 3.0
lr = 1.4e-5
warmup = 0.0
final_lr = 1.0
grad_clip = 0.0

eval = {'tasks': ('mmlu',)}
