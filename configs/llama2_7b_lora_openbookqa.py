"""Llama 2 7B with LoRA on OpenBookQA by answer letter, as in the Bayesian-LoRA literature.

It is their baseline (MLE): Laplace-LoRA (Yang et al. 2024, arXiv 2308.13111) and BLoB (Wang et al.
2024, arXiv 2406.11675). The values are those of BLoB's scripts/mle/mle-llama-all.sh (github.com/
Wang-ML-Lab/bayesian-peft, commit 50f6e57): its 5,000 steps of 4 questions on each of two GPUs are
10,000 here. Laplace-LoRA's run_gpt.py (github.com/adamxyang/laplace-lora, commit 434e0a4) takes as
many steps, with lr 5e-5, no warm-up and dropout 0.1. What differs from both:

- Loss: over the whole vocabulary; theirs is over the logits of the letters alone.
- Prompt: MMLU's, as `--shots=0` evaluates it; each of them has a prompt of its own.
- Adapters: on queries and values; they adapt the output layer as well.
- Weights: bfloat16; theirs are quantized to 8 bits.
- Report: on the test split; Laplace-LoRA reports on the validation split.

Other tasks: --data=winogrande_s --eval.tasks=winogrande_s, in the same way winogrande_m, boolq,
arc_easy, arc_challenge, piqa. `epochs` only has to be enough for max_steps: 63 for winogrande_s.
"""

out_dir = 'out/llama2_7b_lora_openbookqa'
model = 'meta-llama/Llama-2-7b-hf'
data = 'openbookqa'
data_kind = 'questions'
lora = True
lora_rank = 8
lora_alpha = 16.0
lora_dropout = 0.0
lora_targets = ('q_proj', 'v_proj')

batch_size = 4
epochs = 9.0
max_steps = 10000
lr = 1e-4
schedule = 'linear'
warmup = 0.06
grad_clip = 0.0
max_length = 1024       # of BoolQ's longest passages; theirs are cut after 300 tokens
pack_len = 1024
checkpoint_epochs = False

eval = {'tasks': ('openbookqa',), 'shots': 0}
