"""TRL's SFTTrainer as its users write it; sft.py runs this with its settings as JSON.

It prints the lines of train.py from which sft.py reads the time. Its settings are its fastest
ones: weights and moments in bfloat16, no gradient checkpointing, a process per core to tokenize.
"""

import json
import os
import sys

settings = json.loads(sys.argv[1])

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Lines(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        print(f'device: {args.device}')

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 1:
            synchronize()
            print('step 1/')


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main():
    cpu, out = not torch.cuda.is_available(), settings['out']
    adapters = None
    if settings['lora']:
        from peft import LoraConfig
        adapters = LoraConfig(**settings['lora'])
    config = SFTConfig(
        output_dir=out, packing=True, max_length=settings['pack_len'], num_train_epochs=1,
        per_device_train_batch_size=1, gradient_accumulation_steps=settings['rows'],
        # FlexAttention cannot compile its kernel for rows of fewer than 128 tokens
        pad_to_multiple_of=settings['pack_len'] if settings['compiled'] else 128,
        torch_compile=settings['compiled'], use_liger_kernel=settings['liger'],
        dataset_num_proc=os.cpu_count(), gradient_checkpointing=False, learning_rate=2e-5,
        optim='adamw_torch_fused', save_strategy='no', report_to='none', disable_tqdm=True,
        bf16=not cpu, use_cpu=cpu, model_init_kwargs={
            'dtype': 'bfloat16', 'attn_implementation': 'sdpa' if cpu else 'flex_attention'})
    trainer = SFTTrainer(
        settings['model'], config, callbacks=[Lines()], peft_config=adapters,
        train_dataset=load_dataset('json', data_files=settings['data'], split='train'),
        processing_class=AutoTokenizer.from_pretrained(settings['model']))
    trainer.train()
    synchronize()
    peak = 0 if cpu else torch.cuda.max_memory_allocated() / 2 ** 30
    print(f'steps: {trainer.state.global_step}')
    print(f'peak memory {peak:.2f} GiB')
    trainer.save_model()


if __name__ == '__main__':
    main()
