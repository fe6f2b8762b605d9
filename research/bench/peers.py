"""Training steps of other libraries at their best, for research/bench/train.py.

All have bfloat16 weights and moments, fused AdamW and clipping at 1.
"""

import numpy as np
import torch

from research.bench.common import DEVICE, now, peer_model
from data.packing import IGNORE, pack

# of each of its trainers
TRL_SETTINGS = {'bf16': DEVICE == 'cuda', 'use_cpu': DEVICE == 'cpu', 'optim': 'adamw_torch_fused',
                'gradient_checkpointing': False, 'save_strategy': 'no', 'report_to': 'none',
                'disable_tqdm': True}


def hugging_face_step(raw, attention, liger=False, compiled=False, padded=None, packed=None,
                      micro_rows=1):
    """Return step(batch) of a Hugging Face model; a batch is a list of (tokens, loss mask).

    padded: sequences in a forward pass, padded to the longest; packed: tokens in a row, packed as
    ours are, with position_ids, `micro_rows` in a pass; neither: all rows, of one length, in a pass
    """
    if liger:
        import liger_kernel.transformers as kernels
        getattr(kernels, f'apply_liger_kernel_to_{raw["model_type"]}')()
    model = peer_model(raw, attention).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    call = torch.compile(model) if compiled else model

    def inputs(batch):
        if padded:
            return padded_inputs(batch, padded)
        if packed:
            return packed_inputs(batch, packed, micro_rows)
        ids = torch.stack([torch.from_numpy(tokens) for tokens, _ in batch])
        return [{'input_ids': ids, 'labels': ids}]

    def step(batch):
        for tensors in inputs(batch):
            call(**{key: x.to(DEVICE) for key, x in tensors.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    step.model = model      # for the tests
    return step


def padded_inputs(batch, size):
    """Yield the inputs of forward passes of `size` sequences, padded to their longest."""
    n_supervised = torch.tensor(sum(int(loss_mask[1:].sum()) for _, loss_mask in batch))
    for start in range(0, len(batch), size):
        chosen = batch[start:start + size]
        shape = len(chosen), max(len(tokens) for tokens, _ in chosen)
        ids, labels, mask = (torch.full(shape, value) for value in (0, IGNORE, 0))
        for i, (tokens, loss_mask) in enumerate(chosen):
            row = torch.from_numpy(tokens.astype('int64'))
            ids[i, :len(row)], mask[i, :len(row)] = row, 1
            labels[i, :len(row)] = row.where(torch.from_numpy(loss_mask > 0), IGNORE)
        yield {'input_ids': ids, 'attention_mask': mask, 'labels': labels,
               'num_items_in_batch': n_supervised}


def packed_inputs(batch, length, at_once=1):
    """Yield the inputs of forward passes of `at_once` packed rows each.

    The model finds the documents by their positions, and masks attention between them.
    """
    rows = pack(batch, length, at_once)
    n_supervised = torch.tensor((rows.targets != IGNORE).sum())  # an int is compiled in
    for i in range(0, len(rows.tokens), at_once):
        ids, positions, targets = (torch.from_numpy(x[i:i + at_once])
                                   for x in (rows.tokens, rows.positions, rows.targets))
        yield {'input_ids': ids, 'position_ids': positions, 'labels': targets,
               'shift_labels': targets, 'num_items_in_batch': n_supervised}


def trl_steps(raw, batches, marks, steps, folder, length, attention, compiled=False, micro_rows=1):
    """Train with TRL's SFTTrainer and its packing; return the mean number of tokens in a step.

    length: tokens in a row at most; micro_rows: of them in a pass, which TRL concatenates. marks is
    called at the beginning and after each `steps` steps, four times.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Marks(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 0:
                marks()

        def on_step_end(self, args, state, control, **_):
            if state.global_step % steps == 0:
                marks()

    data = Dataset.from_list([{'input_ids': tokens.tolist(),
                               'labels': np.where(mask, tokens.astype('int64'), IGNORE).tolist()}
                              for batch in batches for tokens, mask in batch])
    n_rows = len(pack(batches[0], length).tokens)    # of a step like ours
    config = SFTConfig(
        output_dir=str(folder), packing=True, max_length=length, max_steps=4 * steps,
        per_device_train_batch_size=micro_rows,
        gradient_accumulation_steps=max(1, n_rows // micro_rows),
        pad_to_multiple_of=micro_rows * length if compiled else None, torch_compile=compiled,
        learning_rate=1e-5, max_grad_norm=1.0, logging_strategy='no', **TRL_SETTINGS)
    trainer = SFTTrainer(peer_model(raw, attention), config, train_dataset=data,
                         processing_class=plain_tokenizer(), callbacks=[Marks()])
    packed_rows = trainer.train_dataset
    trainer.train()
    now()
    tokens = sum(map(len, packed_rows['input_ids'])) / len(packed_rows)
    return tokens * micro_rows * config.gradient_accumulation_steps


def plain_tokenizer():
    """A tokenizer for a trainer that wants one and has nothing to tokenize."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    words = models.WordLevel({'<pad>': 0, '<eos>': 1}, unk_token='<pad>')
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token='<pad>',
                                   eos_token='<eos>')
