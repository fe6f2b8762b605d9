"""Files of tensors: safetensors, torch's pickles, indices of shards, and the names in them."""

import pickle
import re
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from model import ModelConfig
from runtime.config_keys import SEQ2SEQ
from runtime.errors import CheckpointError
from runtime.json_rules import read_json_object

FLOAT_TYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16
# tensors of files that a text model does not need: rotary frequencies, causal masks and their fill
# value; T5's copies of the embedding and its unused table of positions; the weights for images
BUFFERS = re.compile(r'.*rotary_emb\.inv_freq|gpt_neox\.layers\.\d+\.attention\.(masked_)?bias|'
                     r'(en|de)coder\.embed_tokens\.weight|'
                     r'decoder.*\.EncDecAttention\.relative_attention_bias\.weight|'
                     r'(model\.)?(vision_tower|multi_modal_projector)\..*')
# (part of our name, part of the name on disk) of a parameter, applied in this order
LLAMA_NAMES = (('pre_feedforward_layernorm', 'post_attention_layernorm'),)
NAMES = {
    'gemma2': (), 'gemma3_text': (), 'olmo2': (), 'olmo3': (),
    'gpt_neox': (*LLAMA_NAMES, ('model.norm', 'gpt_neox.final_layer_norm'), ('model.', 'gpt_neox.'),
                 ('embed_tokens', 'embed_in'), ('lm_head', 'embed_out'),
                 ('self_attn.qkv_proj', 'attention.query_key_value'),
                 ('self_attn.o_proj', 'attention.dense'), ('mlp.up_proj', 'mlp.dense_h_to_4h'),
                 ('mlp.down_proj', 'mlp.dense_4h_to_h')),
    'opt': (('model.norm', 'model.final_layer_norm'), ('model.', 'model.decoder.'),
            ('input_layernorm', 'self_attn_layer_norm'), ('o_proj', 'out_proj'),
            ('pre_feedforward_layernorm', 'final_layer_norm'),
            ('post_attention_layernorm', 'self_attn_layer_norm'),
            ('post_feedforward_layernorm', 'final_layer_norm'),
            ('mlp.up_proj', 'fc1'), ('mlp.down_proj', 'fc2')),
    **dict.fromkeys(SEQ2SEQ, (('model.embed_tokens', 'shared'),)),
}
# (prefix of a name in a multimodal model or in OPT's files, its replacement)
PREFIXES = ((r'^language_model\.(?=model\.|lm_head)', ''), (r'^model\.language_model\.', 'model.'))
OPT_PREFIXES = ((r'^decoder\.', 'model.decoder.'),)


def their_key(key: str, config: ModelConfig) -> str:
    """Return the name on disk of a parameter, or of a part of one, such as an adapted layer."""
    for ours, theirs in NAMES.get(config.model_type, LLAMA_NAMES):
        key = key.replace(ours, theirs)
    return key


def text_key(stored: str, config) -> str:
    """Return the name that a tensor of a file has in a file that holds only the text model."""
    for pattern, replacement in OPT_PREFIXES if config.model_type == 'opt' else PREFIXES:
        stored = re.sub(pattern, replacement, stored)
    return stored


def names_on_disk(model) -> dict[str, str]:
    """Return {name on disk: our name} of the parameters of a model."""
    return {their_key(key, model.config): key for key, _ in model.named_parameters()}


def shapes_on_disk(model) -> dict[str, list[int]]:
    """Return {name on disk: shape} of the parameters of a model."""
    return {their_key(key, model.config): [*p.shape] for key, p in model.named_parameters()}


def weight_files(folder: Path) -> dict[Path, set | None]:
    """Return {file of a model's weights: names of its tensors by the index of shards, or None}."""
    for single in (folder / 'model.safetensors', folder / 'pytorch_model.bin'):
        index = single.with_name(f'{single.name}.index.json')
        if index.exists():
            names = read_json_object(index).get('weight_map')
            if not isinstance(names, dict) or not names:
                raise CheckpointError(f'{index}: weight_map must be an object: tensors and shards')
            here = [path.name for path in folder.glob(f'*{single.suffix}')]
            for name in names.values():
                if name not in here:
                    raise CheckpointError(f'{index} names {name!r}, which is not a {single.suffix} '
                                          f'file in this folder; download it again')
            if single.exists() and single.name not in names.values():
                raise CheckpointError(f'{folder} holds two models: {single.name}, and the shards '
                                      f'of {index.name}; remove the one that is out of date')
            files = {}
            for key, name in names.items():
                files.setdefault(folder / name, set()).add(key)
            return files
        if single.exists():
            return {single: None}
    raise CheckpointError(f'{folder} has no model.safetensors, no pytorch_model.bin and no index '
                          f'of shards; .pth files are not read: convert them to safetensors')


def read_weights(folder: Path):
    """Yield (file, name, tensor) of a model's weights, mapped; of shards what the index lists."""
    for path, names in weight_files(folder).items():
        for key, tensor in read_tensors(path).items():
            if names is None or key in names:
                yield path, key, tensor


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, mapped: read when they are used. Raises CheckpointError."""
    try:
        if path.suffix != '.bin':
            return load_file(path)
        tensors = torch.load(path, 'cpu', mmap=True, weights_only=True)
        for key, x in tensors.items():
            if not isinstance(key, str) or x.layout is not torch.strided or (
                    x.is_meta or x.is_nested or x.is_quantized or x.is_complex()):
                raise ValueError(f'{key!r} is not the name of a dense tensor of real numbers')
        return tensors
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError, TypeError, AttributeError,
            pickle.UnpicklingError) as error:
        # torch says at length how to run the code in a pickle
        reason = 'UnpicklingError' if isinstance(error, pickle.UnpicklingError) else error
        raise CheckpointError(
            f'{path} cannot be read, is truncated, out of date or not a file of weights '
            f'({reason!s:.300}); download it again, or convert weights of torch before 1.6 to '
            f'safetensors') from error


def nonfinite_tensor(folder: str | Path) -> str | None:
    """Return the name of the first tensor of a model folder with NaN or infinity in it, or None."""
    for _, key, tensor in read_weights(Path(folder)):
        # the fill value of Pythia's masks, -1e9, is minus infinity in float16
        if (tensor.is_floating_point() and not tensor.isfinite().all()
                and not BUFFERS.fullmatch(key)):
            return key
    return None


def bad_logits(where: str, folder: str | Path, dtype: str, what: str = 'logits') -> str:
    """Return the message for NaN or infinite logits: which tensor is damaged, if one is."""
    if name := nonfinite_tensor(folder):
        cause = f'{name} in {folder} holds NaN or infinity: download or train the model again'
    elif dtype == 'float32':
        cause = (f'the weights in {folder} are finite, but activations overflow even in float32: '
                 f'check config.json, or train the model again with a lower lr')
    else:
        cause = (f'the weights in {folder} are finite; activations probably overflow in {dtype}: '
                 f'compute in float32 (align.py, evaluate.py --dtype=float32; '
                 f'sample.py --device=cpu)')
    return f'{where}: the model gives NaN or infinite {what}; {cause}'


# ---- Adapters: changes of low rank ---------------------------------------------------------------

class LowRank(NamedTuple):
    """The change of a layer's weight, scale * B A, with A [r, in] and B [out, r]."""
    A: Tensor
    B: Tensor
    scale: float


def merged(weight: Tensor, change: LowRank) -> Tensor:
    """Return weight + scale * B A, computed in float32 and rounded once to the type of `weight`."""
    A, B = (x.to(weight.device, torch.float32) for x in (change.A, change.B))
    return (weight.float() + B @ A * change.scale).to(weight.dtype)
